#!/bin/sh
# Builds llama-batched-bench of llama.cpp for the GPU of this machine (needs the CUDA toolkit and cmake).
#   bench/build_llama_cpp.sh SOURCE BUILD
# SOURCE: a checkout of llama.cpp. The source distribution of llama-cpp-python on PyPI has one in vendor/llama.cpp.
set -eu
source=$1 build=$2
cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-native}" \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_IS_DEV=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
cmake --build "$build" --target llama-batched-bench --parallel "$(nproc)"
