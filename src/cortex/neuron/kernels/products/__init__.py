"""What the GEMM and GEMV kernels of all storages share: how they are launched, begin and end. Inner loops differ."""
