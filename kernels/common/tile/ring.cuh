// A ring of buffers between a producer and its consumers.
#pragma once

// A position in a ring of Stages buffers: consumers wait for `phase`, the producer for `phase ^ 1`.
template <int Stages>
struct Ring {
    unsigned stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Stages) stage = 0, phase ^= 1;
    }
    // Count positions on, at most Stages; and to the position of the index-th use.
    template <int Count>
    __device__ __forceinline__ void skip() {
        static_assert(Count <= Stages, "a ring is passed at most once");
        stage += Count;
        if (stage >= Stages) stage -= Stages, phase ^= 1;
    }
    __device__ __forceinline__ void to(unsigned index) {
        stage = index % Stages, phase = index / Stages & 1;
    }
};
