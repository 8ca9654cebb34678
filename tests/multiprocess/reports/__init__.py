"""Cases of public bug reports and questions, by kind."""
