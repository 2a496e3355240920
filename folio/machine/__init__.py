"""Hardware: device, dtype, processes, kernels, free memory, and machine code for this CPU."""
