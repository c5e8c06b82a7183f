// The kernels of all models but attention as one unit, see all_attention.cpp.
#include "delta_net.cpp"
#include "dense.cpp"
#include "elementwise.cpp"
#include "exchange.cpp"
#include "mixture.cpp"
#include "program.cpp"
#include "quantised.cpp"
