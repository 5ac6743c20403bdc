"""What the product kernels of all storages share: how they are launched, begin and end. Inner loops are their own."""
