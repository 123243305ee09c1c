//! Sliding windows over images.

use crate::error::Error;

/// Square windows over images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Image height.
    pub height: u32,
    /// Image width.
    pub width: u32,
    /// Window size in pixels.
    pub kernel: u32,
    /// Pixels between neighbouring windows.
    pub stride: u32,
    /// Pixels by which windows can extend beyond each edge of the image.
    pub padding: u32,
}

impl Windows {
    /// Rejects windows that do not fit, and batches with too many windows or pixels of `numbers`
    /// elements each.
    pub(super) fn check(self, call: &'static str, batch: u32, numbers: u64) -> Result<(), Error> {
        let Windows { height, width, kernel, stride, padding } = self;
        let fits = kernel > 0 && stride > 0 && padding < kernel && height.min(width) + 2 * padding >= kernel;
        let (rows, columns) = if fits { self.result() } else { (0, 0) };
        let pixels = (u64::from(height) * u64::from(width)).max(u64::from(rows) * u64::from(columns));
        if !fits || batch == 0 || u64::from(batch) * pixels * numbers >= 1 << 31 {
            let text = format!(
                "{batch} images of {height} x {width} pixels, windows of {kernel}, stride {stride}, padding {padding}, expected \
                 at least one of each, padding below the window, and fewer than 2^31 numbers"
            );
            return Err(Error::refused(call, text));
        }
        Ok(())
    }

    /// Number of windows in a column and in a row.
    pub(super) fn result(self) -> (u32, u32) {
        let count = |size: u32| (size + 2 * self.padding - self.kernel) / self.stride + 1;
        (count(self.height), count(self.width))
    }

    /// Number of pixels of an image, and of its windows.
    pub(super) fn pixels(self) -> (u32, u32) {
        let (rows, columns) = self.result();
        (self.height * self.width, rows * columns)
    }

    pub(super) fn definitions(self) -> Vec<String> {
        let Windows { height, width, kernel, stride, padding } = self;
        let (rows, columns) = self.result();
        let named = [
            ("IMAGE_ROWS", height),
            ("IMAGE_COLUMNS", width),
            ("RESULT_ROWS", rows),
            ("RESULT_COLUMNS", columns),
            ("KERNEL", kernel),
            ("STRIDE", stride),
            ("PADDING", padding),
        ];
        named.map(|(name, number)| format!("-D{name}={number}")).to_vec()
    }
}
