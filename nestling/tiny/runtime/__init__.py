"""The C runtime, and what compiles and drives it on this machine."""
