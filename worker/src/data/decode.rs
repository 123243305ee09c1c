//! Decodes JPEG and PNG files to RGB.

use super::loaded;
use png::{ColorType, Limits, Transformations};
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

const MAX_SIDE: usize = loaded::MAX_SIDE as usize;
/// Maximum pixels per image: 64 Mi, 192 MiB as RGB. Checked against the header before allocating
/// memory.
const MAX_PIXELS: usize = 1 << 26;
/// Bytes per pixel of every decoded image.
pub(super) const CHANNELS: usize = 3;

/// A decoded image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    pub height: usize,
    pub width: usize,
    /// `[height, width, 3]`
    pub pixels: Vec<u8>,
}

/// Decodes a file by its magic number, whatever its name. Grey is expanded to RGB, alpha is
/// dropped, 16-bit channels become 8-bit, palettes are expanded, and only the first frame of an
/// animation is decoded. EXIF orientation is ignored, as in common loaders.
///
/// # Errors
/// The problem with the file, as text.
pub(super) fn decode(file: &[u8]) -> Result<Decoded, String> {
    let by_content = || match file {
        [] => Err("is empty".to_owned()),
        [0xff, 0xd8, ..] => jpeg(file),
        [0x89, b'P', b'N', b'G', ..] => png(file),
        _ => Err("is neither JPEG nor PNG: wrong first bytes".to_owned()),
    };
    // A decoder panic on a bad file must not end the training; there is no shared state that could
    // be left inconsistent.
    catch_unwind(AssertUnwindSafe(by_content)).unwrap_or_else(|_| Err("made the decoder panic".to_owned()))
}

fn check_size(width: usize, height: usize) -> Result<(), String> {
    match () {
        () if width == 0 || height == 0 => Err(format!("is {width}x{height} pixels")),
        () if width > MAX_SIDE || height > MAX_SIDE || width * height > MAX_PIXELS => Err(format!(
            "is {width}x{height} pixels: expected sides of at most {MAX_SIDE} and {MAX_PIXELS} pixels in all"
        )),
        () => Ok(()),
    }
}

fn jpeg(file: &[u8]) -> Result<Decoded, String> {
    let wrong = |error| format!("is not a JPEG that can be decoded: {error}");
    let options = DecoderOptions::default()
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers().map_err(wrong)?;
    let info = decoder.info().ok_or("is a JPEG without a picture")?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    check_size(width, height)?;
    if info.components > 3 {
        return Err(format!("is a JPEG of {} colours (CMYK): expected grey or RGB", info.components));
    }
    // The decoder fills in missing data, so check for the end marker here.
    if !has_end_marker(file) {
        return Err("is a JPEG that is cut off".to_owned());
    }
    let pixels = decoder.decode().map_err(wrong)?;
    check_length(Decoded { height, width, pixels })
}

/// Whether the image data of a JPEG are followed by an end marker. The marker cannot occur inside
/// the image data, but can occur before: an embedded thumbnail is itself a JPEG.
fn has_end_marker(file: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, marker]) = file.get(at..at + 2) {
        let Some(&[high, low]) = file.get(at + 2..at + 4) else { return false };
        match marker {
            // Fill byte.
            0xff => at += 1,
            // Start of scan.
            0xda => return file[at..].windows(2).any(|pair| pair == [0xff, 0xd9]),
            _ => at += 2 + usize::from(u16::from_be_bytes([high, low])),
        }
    }
    false
}

fn png(file: &[u8]) -> Result<Decoded, String> {
    let wrong = |error| format!("is not a PNG that can be decoded: {error}");
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), Limits { bytes: 8 * MAX_PIXELS });
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let header = decoder.read_header_info().map_err(wrong)?;
    let (width, height) = (header.width as usize, header.height as usize);
    check_size(width, height)?;
    let mut reader = decoder.read_info().map_err(wrong)?;
    let mut bytes = vec![0; reader.output_buffer_size().ok_or("is too large")?];
    let frame = reader.next_frame(&mut bytes).map_err(wrong)?;
    bytes.truncate(frame.buffer_size());
    let pixels = match frame.color_type {
        ColorType::Rgb => bytes,
        ColorType::Rgba => bytes.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        ColorType::Grayscale => bytes.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::GrayscaleAlpha => bytes.chunks_exact(2).flat_map(|pixel| [pixel[0]; 3]).collect(),
        ColorType::Indexed => return Err("is a PNG whose palette cannot be expanded".to_owned()),
    };
    check_length(Decoded { height: frame.height as usize, width: frame.width as usize, pixels })
}

/// Checks that the decoder returned as many bytes as it announced.
fn check_length(image: Decoded) -> Result<Decoded, String> {
    match image.height * image.width * CHANNELS {
        expected if expected == image.pixels.len() && expected > 0 => Ok(image),
        expected => Err(format!("decodes to {} bytes: expected {expected}", image.pixels.len())),
    }
}

#[cfg(test)]
mod tests;
