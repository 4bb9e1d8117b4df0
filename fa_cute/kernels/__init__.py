"""The kernels, one a file, each opening with its timeline, its roles and its rings."""
