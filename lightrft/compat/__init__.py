"""Classes and functions with LightRFT's names and signatures, over the functions of lightrft."""
