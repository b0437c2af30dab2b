"""GGUF work: inspect, quantize, calibrate, upcycle. Needs numpy and gguf; torch only to train."""
