"""What kernels are made of: edges between warps, layouts, masks, softmax, the emitter of mods."""
