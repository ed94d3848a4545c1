"""From a torch module to what the C runtime runs: its operations, where every buffer lies, and what
that costs in RAM and flash."""
