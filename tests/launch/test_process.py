"""The kinds of lines that tasks print: lines as TensorFlow 2.15 to 2.21, Python and absl print them."""

import pytest

from tfdist.launch import process
from tfdist.runtime import tensorflow_log

TENSORFLOW_LOG = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"I0000 00:00:1795536441.651659    1998 port.cc:153] oneDNN custom operations are on. To turn them off, set x=0.",
    b"I0000 00:00:1795536441.651984    1998 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.",
    b"2026-01-31 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized",
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate compiler flags.",
    b"I0000 00:00:1795536441.65 1998 gpu_device.cu.cc:31] x",
    b"E0000 00:00:1795536443.689268    1998 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to "
    b"cuInit: UNKNOWN ERROR (303)",
    b"2024-03-01 10:00:00.000001: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:274] failed call to cuInit: "
    b"CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
    b"2024-03-01 10:00:00.000001: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] Unable to register cuDNN "
    b"factory: Attempting to register factory for plugin cuDNN when one has already been registered",
    b"W0000 00:00:1731490000.123456  4242 computation_placer.cc:177] computation placer already registered. Please check linkage",
    b"2024-03-01 10:00:00.1: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
    b"2024-03-01 10:00:00.1: W tensorflow/core/framework/local_rendezvous.cc:404] Local rendezvous is aborting with status: "
    b"OUT_OF_RANGE: End of sequence",
]
SHOWN = [
    b"F0000 00:00:1795536443.689268    1998 tensor.cc:852] Check failed: dtype() == expected_dtype (1 vs. 9)",
    b"2026-01-31 12:00:00.123456: F tensorflow/core/framework/tensor.cc:852] Check failed: cuInit",
    b"E0000 00:00:1795536443.689268    1998 coordination_service_agent.cc:52] heartbeat: DEADLINE_EXCEEDED",
    b"2026-01-31 12:00:00.123456: E tensorflow/core/common_runtime/x.cc:1] no memory",
    b"W0000 00:00:1795536443.689268    1998 xla_launch.cc:52] slow",
    b"*** Check failure stack trace: ***",
    b"    @     0x7f0000000000  tensorflow::Tensor::CheckType()",
    b"Traceback (most recent call last):",
    b'  File "x.py", line 1, in <module>',
    # The user's own.
    b"I1124 16:06:23.123456 140123 script.py:12] mine",
    b"W1124 16:06:23.123456 140123 script.py:12] mine",
    b"I0000 is a product",
    b"2026-01-31 12:00:00.123456: I am here",
    b"2026-01-31 12:00:00.123456: I epoch.py:12] began",
    b"WARNING: All log messages are mine",
    b"To enable the following instructions: read on",
    b"/job:worker/replica:0/task:0",
    b"the text I0000 00:00:1795536441.651659    1998 port.cc:153] within a line",
    b"cuInit",
]


@pytest.mark.parametrize("line", TENSORFLOW_LOG)
def test_tensorflows_log_is_known(line):
    assert tensorflow_log.is_tensorflow_log(line)


def test_tensorflows_report_of_a_lost_worker_is_known_with_its_further_lines():
    report = b"ERROR:tensorflow:Worker /job:worker/replica:0/task:0 failed with UnavailableError():Failed copying"
    remote = b"Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling /x:"
    received = b':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}'
    assert tensorflow_log.is_tensorflow_log(report)
    for line in (remote, received):
        assert tensorflow_log.is_tensorflow_log(line, after_log=True) and not tensorflow_log.is_tensorflow_log(line)


def test_reports_of_lost_tasks_are_those_of_connections_and_aborts():
    known = [
        b"E0000 00:00:1795764456.413203   32411 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort UNAVAILABLE: x",
        b"E0000 00:00:1795763964.744299   28400 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: Socket closed",
    ]
    assert all(map(tensorflow_log.reports_lost_task, known))
    others = [b"E0000 00:00:1795763964.744299 28400 x.cc:1] no memory", b"the server is UNAVAILABLE"]
    assert not any(map(tensorflow_log.reports_lost_task, others))


@pytest.mark.parametrize("line", SHOWN)
def test_what_is_not_surely_tensorflows_or_tells_of_a_fault_is_shown(line):
    assert not tensorflow_log.is_tensorflow_log(line)
    # ... also behind a line of TensorFlow's, but for the tasks that such a line lists.
    assert tensorflow_log.is_tensorflow_log(line, after_log=True) == line.startswith(b"/job:")


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        (b"10%\r20%\r", b"20%"),
        (b"\r\x1b[1m3/10\x1b[0m \x1b[32m\xe2\x94\x81\x1b[0m", b""),
        (b"\x08\x08\r\x1b[1m10/10\x1b[0m \x1b[32m\xe2\x94\x81\x1b[0m 1s\n", b"10/10 \xe2\x94\x81 1s"),
        (b"a\x1b[31mred\x1b[0m \x1b[2K\x1b]0;title\x07x\x1b[?25l\x1b(B\x1b7", b"ared x"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x07", b"link"),
        ("\tä ✓ 漢字".encode(), "\tä ✓ 漢字".encode()),
        (b"[1m is mine", b"[1m is mine"),
    ],
)
def test_lines_are_shown_without_escape_codes(line, plain):
    assert process.to_plain(line) == plain
