"""Cases: each trains a small model and compares it with arithmetic; one program runs the cases of an arm."""
