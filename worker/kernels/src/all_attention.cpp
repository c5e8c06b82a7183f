// Attention as one unit: to read the headers of the intrinsics takes a compiler as long as to compile
// most of these files. There are two such units, which take equally long.
#include "attention.cpp"
#include "chunks.cpp"
