{
  description = "Routed experts of a mixture-of-experts block: tile-aware grouped products in Triton, torch elsewhere";

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
