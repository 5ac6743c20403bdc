module cortex/bench

go 1.19
