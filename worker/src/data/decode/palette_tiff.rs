//! TIFF images with a palette. The `tiff` crate reads their indices as the grey values of an image
//! without one.

use super::{CHANNELS, Decoded, check_length, check_size, upright};
use image::metadata::Orientation;
use std::io::Cursor;
use tiff::ColorType;
use tiff::decoder::{Decoder, DecodingResult};
use tiff::tags::{PhotometricInterpretation, Tag};

/// Bytes of an entry in a directory: tag and type with 2 bytes, count and value with 4.
const ENTRY: usize = 12;

/// A copy of the file whose pixels are grey instead of colours of its palette. `None` without a
/// palette. Only the first image counts.
pub(super) fn indices(file: &[u8]) -> Option<Vec<u8>> {
    let is_little = match file.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| -> Option<u16> {
        let bytes = *file.get(at..)?.first_chunk()?;
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let start = *file.get(4..)?.first_chunk()?;
    let start = if is_little { u32::from_le_bytes(start) } else { u32::from_be_bytes(start) } as usize;
    let mut entries = (0..usize::from(short(start)?)).map(|entry| start + 2 + ENTRY * entry);
    let entry = entries.find(|entry| short(*entry) == Some(Tag::PhotometricInterpretation.to_u16()))?;
    let value = entry + 8;
    if short(value)? != PhotometricInterpretation::RGBPalette.to_u16() {
        return None;
    }
    let grey = PhotometricInterpretation::BlackIsZero.to_u16();
    let mut copy = file.to_vec();
    copy[value..value + 2].copy_from_slice(&if is_little { grey.to_le_bytes() } else { grey.to_be_bytes() });
    Some(copy)
}

/// Decodes the copy that [`indices`] made. 16-bit colours become 8-bit, as in PIL.
pub(super) fn decode(indices: &[u8]) -> Result<Decoded, String> {
    let wrong = |error| format!("is not a TIFF with a palette that can be decoded: {error}");
    let mut decoder = Decoder::new(Cursor::new(indices)).map_err(wrong)?;
    let (width, height) = decoder.dimensions().map_err(wrong)?;
    let (width, height) = (width as usize, height as usize);
    check_size(width, height)?;
    let bits = match decoder.colortype().map_err(wrong)? {
        ColorType::Gray(bits @ (1 | 2 | 4 | 8)) => usize::from(bits),
        other => return Err(format!("is a TIFF with a palette for {other:?}: expected indices of 1, 2, 4 or 8 bits")),
    };
    let colours: Vec<u16> = decoder.find_tag_unsigned_vec(Tag::ColorMap).map_err(wrong)?.unwrap_or_default();
    let expected = CHANNELS << bits;
    if colours.len() != expected {
        return Err(format!("is a TIFF with a palette of {} values: expected {expected}", colours.len()));
    }
    let orientation: Option<u8> = decoder.find_tag_unsigned(Tag::Orientation).map_err(wrong)?;
    let DecodingResult::U8(packed) = decoder.read_image().map_err(wrong)? else {
        return Err("is a TIFF with a palette whose indices are not bytes".to_owned());
    };
    // Each row begins with a new byte, and its first pixel is in the high bits.
    let row_bytes = (width * bits).div_ceil(8);
    if packed.len() != row_bytes * height {
        return Err(format!("decodes to {} bytes: expected {}", packed.len(), row_bytes * height));
    }
    let colour = |index: usize| [0, 1, 2].map(|channel| (colours[(channel << bits) + index] >> 8) as u8);
    let index = |row: &[u8], x: usize| {
        let bit = x * bits;
        usize::from(row[bit / 8] >> (8 - bits - bit % 8)) & ((1 << bits) - 1)
    };
    let rows = packed.chunks_exact(row_bytes);
    let pixels = rows.flat_map(|row| (0..width).flat_map(move |x| colour(index(row, x)))).collect();
    upright(check_length(Decoded { height, width, pixels })?, orientation.and_then(Orientation::from_exif))
}
