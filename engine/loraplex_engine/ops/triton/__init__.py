"""The Triton forms of the dense ops, and what all Triton kernels share. Those of LoRA lie with LoRA's other forms."""
