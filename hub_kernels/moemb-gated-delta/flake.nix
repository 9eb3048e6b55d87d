{
  description = "Varlen gated delta rule, causal convolution and norms: Triton on CUDA, torch elsewhere";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
