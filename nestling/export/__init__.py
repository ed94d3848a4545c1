"""Deployment: a trained network as int8 C source, as an int8 .tflite file and as ONNX.

`fold` brings a network to the few operations that are left in a forward pass, `quantise` to eight
bits, and `reference` says what the eight-bit network computes, to the bit. `c_source`, `tflite` and
`onnx_file` write it down; `sizes` says what it takes on a device.
"""
