"""`cortex up`: a gateway and a neuron on this machine as one supervised command."""
