// Twin of tests/families/twice.cuh.
#pragma once
inline float half_to_float(unsigned short x) {
    _Float16 half;
    __builtin_memcpy(&half, &x, 2);
    return half;
}
inline unsigned short float_to_half(float x) {
    _Float16 half = x;
    unsigned short bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
}
