"""CPU kernels in C++, called through ctypes, for what torch computes in many small steps.

`build` compiles `src/` for one kind of CPU, `library` loads the result, and the other modules are
the kernels as functions of tensors. Without a compiler or a suitable CPU, `library.active()` is
None and the layers compute the same with torch.
"""
