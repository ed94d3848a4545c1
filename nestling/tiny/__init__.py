"""Microcontrollers that train: the C runtime, the planner, boards, the link and the gateway, and
export for inference."""
