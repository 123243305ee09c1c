//! Decodes image files to RGB.

mod palette_tiff;

use super::loaded;
use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, pnm::PnmDecoder, tiff::TiffDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, Limits, RgbImage};
use png::{ColorType, Transformations};
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Extensions of the formats that [`decode`] reads.
pub(super) const EXTENSIONS: [&str; 10] = ["bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"];
/// End marker of a JPEG.
const END: [u8; 2] = [0xff, 0xd9];
const MAX_SIDE: usize = loaded::MAX_SIDE as usize;
/// Maximum pixels per image: 64 Mi, 192 MiB as RGB. Checked against the header before allocating
/// memory.
const MAX_PIXELS: usize = 1 << 26;
/// Maximum bytes of an image in its own format, which can have 16 bytes per pixel.
const MAX_BYTES: u64 = 256 << 20;
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

/// Decodes a file by its first bytes, whatever its name, and turns it upright by its EXIF
/// orientation, as `PIL.ImageOps.exif_transpose` does. Grey is expanded to RGB, CMYK is converted
/// as by PIL, alpha is dropped, 16-bit channels become 8-bit, palettes are expanded, and only the
/// first frame of an animation is decoded.
///
/// # Errors
/// The problem with the file, as text.
pub(super) fn decode(file: &[u8]) -> Result<Decoded, String> {
    let by_content = || match file {
        [] => Err("is empty".to_owned()),
        [0xff, 0xd8, ..] => jpeg(file),
        [0x89, b'P', b'N', b'G', ..] => png(file),
        _ => other(file),
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
    let cut_off = || "is a JPEG that is cut off".to_owned();
    if has_end_marker(file) {
        return jpeg_with_end(file);
    }
    // The decoder takes zeros for missing data. If ones yield the same pixels, nothing but the end
    // marker is missing.
    let padded = |bits: &[u8]| jpeg_with_end(&[file, bits, &END].concat());
    let pixels = padded(&[])?;
    let with_ones = padded(&[0xff, 0].repeat(32));
    if has_later_scans(file) || with_ones.as_ref() != Ok(&pixels) { Err(cut_off()) } else { Ok(pixels) }
}

/// Decodes a JPEG that ends with an end marker.
fn jpeg_with_end(file: &[u8]) -> Result<Decoded, String> {
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
    let pixels = decoder.decode().map_err(wrong)?;
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
    upright(check_length(Decoded { height, width, pixels })?, orientation)
}

/// Whether the image data of a JPEG are followed by an end marker. The marker cannot occur inside
/// the image data, but can occur before: an embedded thumbnail is itself a JPEG.
fn has_end_marker(file: &[u8]) -> bool {
    segments(file).any(|(marker, at)| marker == 0xda && file[at..].windows(2).any(|pair| pair == END))
}

/// Whether scans can follow the first one, so that a file without an end marker can lack some:
/// every kind of JPEG but baseline and extended sequential.
fn has_later_scans(file: &[u8]) -> bool {
    !segments(file).any(|(marker, _)| matches!(marker, 0xc0 | 0xc1))
}

/// Markers and positions of the segments up to the image data.
fn segments(file: &[u8]) -> impl Iterator<Item = (u8, usize)> {
    let mut next = Some(2);
    std::iter::from_fn(move || {
        let mut at = next?;
        while file.get(at..at + 2) == Some(&[0xff, 0xff]) {
            at += 1;
        }
        let &[0xff, marker, high, low] = file.get(at..at + 4)? else { return None };
        let length = usize::from(u16::from_be_bytes([high, low]));
        next = (marker != 0xda).then_some(at + 2 + length);
        Some((marker, at))
    })
}

fn png(file: &[u8]) -> Result<Decoded, String> {
    let wrong = |error| format!("is not a PNG that can be decoded: {error}");
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), png::Limits { bytes: 8 * MAX_PIXELS });
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let header = decoder.read_header_info().map_err(wrong)?;
    let (width, height) = (header.width as usize, header.height as usize);
    check_size(width, height)?;
    let mut reader = decoder.read_info().map_err(wrong)?;
    let exif = reader.info().exif_metadata.clone();
    let orientation = exif.as_deref().and_then(Orientation::from_exif_chunk);
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
    upright(check_length(Decoded { height: frame.height as usize, width: frame.width as usize, pixels })?, orientation)
}

/// Decodes the less common formats.
fn other(file: &[u8]) -> Result<Decoded, String> {
    let read = "BMP, GIF, JPEG, PGM, PNG, PPM, TIFF or WebP";
    let format = image::guess_format(file).map_err(|_| format!("has unknown first bytes: expected {read}"))?;
    let name = format.extensions_str().first().copied().unwrap_or_default().to_uppercase();
    let wrong = |error| format!("is not a {name} that can be decoded: {error}");
    if let Some(indices) = palette_tiff::indices(file).filter(|_| format == ImageFormat::Tiff) {
        return palette_tiff::decode(&indices);
    }
    let content = Cursor::new(file);
    let mut decoder: Box<dyn ImageDecoder> = match format {
        ImageFormat::Bmp => Box::new(BmpDecoder::new(content).map_err(wrong)?),
        ImageFormat::Gif => {
            let mut decoder = GifDecoder::new(content).map_err(wrong)?;
            // For a frame, which can be larger than the image.
            let mut limits = Limits::no_limits();
            limits.max_alloc = Some(MAX_BYTES);
            decoder.set_limits(limits).map_err(wrong)?;
            Box::new(decoder)
        }
        ImageFormat::Pnm => Box::new(PnmDecoder::new(content).map_err(wrong)?),
        ImageFormat::Tiff => Box::new(TiffDecoder::new(content).map_err(wrong)?),
        ImageFormat::WebP => Box::new(WebPDecoder::new(content).map_err(wrong)?),
        _ => return Err(format!("is {name}: expected {read}")),
    };
    let (width, height) = decoder.dimensions();
    check_size(width as usize, height as usize)?;
    if decoder.total_bytes() > MAX_BYTES {
        return Err(format!("decodes to {} bytes: expected at most {MAX_BYTES}", decoder.total_bytes()));
    }
    let orientation = match format {
        ImageFormat::WebP => webp_exif(file)?.and_then(Orientation::from_exif_chunk),
        _ => Some(decoder.orientation().map_err(wrong)?),
    };
    let pixels = DynamicImage::from_decoder(decoder).map_err(wrong)?.into_rgb8().into_raw();
    let image = Decoded { height: height as usize, width: width as usize, pixels };
    upright(check_length(image)?, orientation)
}

/// The content of a WebP's EXIF chunk. The decoder would allocate the length that the chunk
/// declares, up to 4 GiB, before reading it.
fn webp_exif(file: &[u8]) -> Result<Option<&[u8]>, String> {
    let mut chunks = file.get(12..).unwrap_or_default();
    while let [a, b, c, d, l0, l1, l2, l3, rest @ ..] = chunks {
        let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize;
        if [*a, *b, *c, *d] == *b"EXIF" {
            let content = rest.get(..length);
            return content.map(Some).ok_or_else(|| "is a WEBP that is cut off in its EXIF data".to_owned());
        }
        chunks = rest.get(length.next_multiple_of(2)..).unwrap_or_default();
    }
    Ok(None)
}

/// Applies the orientation noted in a file.
fn upright(image: Decoded, orientation: Option<Orientation>) -> Result<Decoded, String> {
    let Some(orientation) = orientation.filter(|orientation| *orientation != Orientation::NoTransforms) else {
        return Ok(image);
    };
    let Decoded { height, width, pixels } = image;
    let pixels = RgbImage::from_raw(width as u32, height as u32, pixels).ok_or("has too few pixels")?;
    let mut image = DynamicImage::ImageRgb8(pixels);
    image.apply_orientation(orientation);
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(Decoded { height, width, pixels: image.into_rgb8().into_raw() })
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
