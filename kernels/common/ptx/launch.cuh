// Programmatic launches: a launch that begins before the one ahead of it has ended, sm_90 on; and
// registers that warpgroups of a block hand to each other. Source: PTX ISA, "griddepcontrol" and
// "setmaxnreg". What the launch ahead writes must not be __restrict__ in a kernel that only reads
// it: the compiler then takes ld.global.nc, which is for what nobody writes while the kernel lives.
#pragma once

namespace attn {

// Until the launch ahead has ended and its writes are seen; at once if this launch is not
// programmatic.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the launch behind begin when every block has said so or ended.
__device__ __forceinline__ void grid_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Registers of each thread of a warpgroup; all its warps execute it.
template <int Registers>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace attn
