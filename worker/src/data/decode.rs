//! JPEG and PNG files to pixels of three bytes.

use super::loaded;
use png::{ColorType, Limits, Transformations};
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

const MAX_SIDE: usize = loaded::MAX_SIDE as usize;
/// Most pixels of an image: 64 Mi, which is 192 MiB of RGB. Checked from the file's header, before memory is allocated.
const MAX_PIXELS: usize = 1 << 26;
/// Bytes of a pixel of every decoded image.
pub(super) const CHANNELS: usize = 3;

/// A decoded image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    pub height: usize,
    pub width: usize,
    /// `[height, width, 3]`
    pub pixels: Vec<u8>,
}

/// Decodes a file by its first bytes, whatever its name. Grey becomes equal red, green and blue; transparency is
/// dropped, 16 bits become 8, a palette becomes its colours, and of an animation the first picture is taken. An
/// orientation in the file's metadata is not applied, as in the usual loaders.
///
/// # Errors
/// What is wrong with the file, in words.
pub(super) fn decode(file: &[u8]) -> Result<Decoded, String> {
    let by_content = || match file {
        [] => Err("is empty".to_owned()),
        [0xff, 0xd8, ..] => jpeg(file),
        [0x89, b'P', b'N', b'G', ..] => png(file),
        _ => Err("is neither JPEG nor PNG: wrong first bytes".to_owned()),
    };
    // A decoder that panics on a file must not end the training; it holds nothing that could be left half changed.
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
    // The decoder fills in what is missing, so the end is checked here.
    if !reaches_its_end(file) {
        return Err("is a JPEG that is cut off".to_owned());
    }
    let pixels = decoder.decode().map_err(wrong)?;
    exact(Decoded { height, width, pixels })
}

/// Whether the picture of a JPEG is followed by the end marker. The marker cannot occur inside the picture, but it can
/// before it: a preview is a JPEG of its own.
fn reaches_its_end(file: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, marker]) = file.get(at..at + 2) {
        let Some(&[high, low]) = file.get(at + 2..at + 4) else { return false };
        match marker {
            // A filler byte.
            0xff => at += 1,
            // Start of the picture.
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
    exact(Decoded { height: frame.height as usize, width: frame.width as usize, pixels })
}

/// A decoder that returns another number of bytes than it announced is wrong about the size.
fn exact(image: Decoded) -> Result<Decoded, String> {
    match image.height * image.width * CHANNELS {
        expected if expected == image.pixels.len() && expected > 0 => Ok(image),
        expected => Err(format!("decodes to {} bytes: expected {expected}", image.pixels.len())),
    }
}

#[cfg(test)]
mod tests;
