"""A user's own kernel: built, checked against its reference, timed.

    extension       C++ and CUDA sources, built and loaded; `extension_build` calls the compilers and keeps builds
    doctor          what usually breaks a build, from the machine and from the compiler's words
    argument_specs  "float[rows, width]": what a kernel takes
    definition      the kernel, its reference and its inputs, read from the user's file
    cases           the sizes, dtypes, layouts and values that are tried
    drawn_inputs    tensors of one case, between guard zones
    guards          memory around inputs and outputs that a kernel must not touch
    judging         how far a result may be from the reference
    kernel_calls    the kernel and its reference on one case
    torch_checks    gradient, torch.compile, autocast, torch.library.opcheck
    shrinking       the smallest case that fails
    speed           the kernel's time beside the reference's and the ceiling
    stages          the whole check, one property after another; `session` is what they share
    child           the process that runs the user's code; `parent` starts it, and survives its death
    sanitizer       AddressSanitizer: how to run under it, and how to read what it says
    result          what a check comes to

The public names are `flatout.kernels.load` and `flatout.kernels.check`.
"""
