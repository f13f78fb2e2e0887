#!/bin/sh
# cuda_skipped.sh - stands for the tests of the CUDA backend where they cannot be built.
. tests/lib.sh
skip "cuda_on_cpu" "no C++ compiler"
closing
