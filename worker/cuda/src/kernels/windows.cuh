// Windows of KERNEL x KERNEL pixels that move over images of IMAGE_ROWS x IMAGE_COLUMNS pixels, from one to the next by STRIDE, and begin PADDING
// pixels outside. There are RESULT_ROWS x RESULT_COLUMNS of them.
#pragma once

constexpr unsigned IMAGE_PIXELS = IMAGE_ROWS * IMAGE_COLUMNS;
constexpr unsigned RESULT_PIXELS = RESULT_ROWS * RESULT_COLUMNS;

// Of window `i` in one direction the first pixel, which may lie outside.
__device__ inline int begin_of(unsigned i) { return (int)(i * STRIDE) - PADDING; }

// Of the windows in one direction that contain pixel `i` the first, and the one behind the last.
__device__ inline unsigned first_window(unsigned i) {
    const unsigned behind = i + PADDING + 1;
    return behind > KERNEL ? (behind - KERNEL + STRIDE - 1) / STRIDE : 0;
}

__device__ inline unsigned end_window(unsigned i, unsigned count) { return min((i + PADDING) / STRIDE + 1, count); }
