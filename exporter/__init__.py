"""Source to bundle: capture, raise, lower, prove. Needs torch, onnx, onnx_ir and onnxscript."""
