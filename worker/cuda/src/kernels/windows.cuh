// Windows of KERNEL x KERNEL pixels that slide over images of IMAGE_ROWS x IMAGE_COLUMNS pixels
// with stride STRIDE, starting PADDING pixels outside. There are RESULT_ROWS x RESULT_COLUMNS of
// them.
#pragma once

constexpr unsigned IMAGE_PIXELS = IMAGE_ROWS * IMAGE_COLUMNS;
constexpr unsigned RESULT_PIXELS = RESULT_ROWS * RESULT_COLUMNS;

// The first pixel of window `i` in one direction, which can be outside the image.
__device__ inline int begin_of(unsigned i) { return (int)(i * STRIDE) - PADDING; }

// In one direction, the first window that contains pixel `i`, and the end of those windows.
__device__ inline unsigned first_window(unsigned i) {
    const unsigned behind = i + PADDING + 1;
    return behind > KERNEL ? (behind - KERNEL + STRIDE - 1) / STRIDE : 0;
}

__device__ inline unsigned end_window(unsigned i, unsigned count) { return min((i + PADDING) / STRIDE + 1, count); }
