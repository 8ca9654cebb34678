"""What becomes of a step whose loss or gradient is not finite. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.config.strategy_traits import StrategyTraits
from tfdist.errors import unknown_name_message

NAN_POLICIES = ("ignore", "stop", "skip")


def faults(policy: str, strategy: str, traits: StrategyTraits | None) -> Iterator[str]:
    """Yields a sentence for a policy that is unknown, or that a strategy cannot follow.

    Args:
        policy: The policy.
        strategy: The strategy's name.
        traits: The strategy's traits, or None if they are unknown.
    """
    if policy not in NAN_POLICIES:
        yield unknown_name_message("nan_policy", policy, NAN_POLICIES)
    elif policy == "skip" and traits and traits.asynchronous:
        yield (
            f"nan_policy 'skip' is not possible under {strategy}, whose workers update variables that are on other machines; use "
            "'stop', which looks at the loss, or 'ignore'."
        )
