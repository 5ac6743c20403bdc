"""Shared by the GEMM and GEMV kernels of all storages: launch, prologue and epilogue. Inner loops differ."""
