// The former place of elements, for templates that include it by this name.
#pragma once
#include "common/tile/fragments.cuh"

using namespace attn;
