"""Bundles at work: sessions, parity, benchmarks. Never imports torch, onnx, onnx_ir, onnxscript or transformers."""
