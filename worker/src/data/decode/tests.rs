use super::*;
use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder};
use png::{BitDepth, Encoder};

/// A 3x2-pixel PNG.
fn png_of(color: ColorType, depth: BitDepth, palette: Option<&[u8]>, data: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, 3, 2);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if let Some(palette) = palette {
        encoder.set_palette(palette);
    }
    encoder.write_header().and_then(|mut writer| writer.write_image_data(data)).expect("encoded");
    file
}

/// A 16x8-pixel JPEG: left half `left`, right half `right`.
fn jpeg_of(color: ExtendedColorType, left: &[u8], right: &[u8]) -> Vec<u8> {
    let line = [left.repeat(8), right.repeat(8)].concat();
    let mut file = Vec::new();
    JpegEncoder::new_with_quality(&mut file, 95).write_image(&line.repeat(8), 16, 8, color).expect("encoded");
    file
}

#[test]
fn every_kind_of_png() {
    let greys = [0_u8, 50, 100, 150, 200, 255];
    let rgb: Vec<u8> = greys.iter().flat_map(|grey| [*grey; 3]).collect();
    let check = |file: &[u8], expected: &[u8]| {
        let image = decode(file).expect("decoded");
        assert_eq!((image.width, image.height), (3, 2));
        assert_eq!(image.pixels, expected);
    };
    let eight = BitDepth::Eight;
    check(&png_of(ColorType::Grayscale, eight, None, &greys), &rgb);
    check(&png_of(ColorType::Rgb, eight, None, &rgb), &rgb);
    let with_alpha: Vec<u8> = greys.iter().flat_map(|grey| [*grey, 7]).collect();
    check(&png_of(ColorType::GrayscaleAlpha, eight, None, &with_alpha), &rgb);
    let with_alpha: Vec<u8> = (0..6).flat_map(|pixel| [pixel, pixel + 10, pixel + 20, 7]).collect();
    let without: Vec<u8> = (0..6).flat_map(|pixel| [pixel, pixel + 10, pixel + 20]).collect();
    check(&png_of(ColorType::Rgba, eight, None, &with_alpha), &without);
    let sixteen: Vec<u8> = greys.iter().flat_map(|grey| [*grey, 99]).collect();
    check(&png_of(ColorType::Grayscale, BitDepth::Sixteen, None, &sixteen), &rgb);
    // Two colours; one bit per pixel, one byte per row.
    let colours = [[9, 8, 7], [1, 2, 3]];
    let palette_file = png_of(ColorType::Indexed, BitDepth::One, Some(&colours.concat()), &[0b0100_0000, 0b1110_0000]);
    check(&palette_file, &[0, 1, 0, 1, 1, 1].map(|index| colours[index]).concat());
    let bits = png_of(ColorType::Grayscale, BitDepth::One, None, &[0b0100_0000, 0b1110_0000]);
    check(&bits, &[0, 1, 0, 1, 1, 1].map(|bit| [255 * bit; 3]).concat());
}

#[test]
fn colour_and_grey_jpeg() {
    for (file, left, right) in [
        (jpeg_of(ExtendedColorType::Rgb8, &[200, 40, 10], &[10, 40, 200]), [200, 40, 10], [10, 40, 200]),
        (jpeg_of(ExtendedColorType::L8, &[30], &[220]), [30; 3], [220; 3]),
    ] {
        let image = decode(&file).expect("decoded");
        assert_eq!((image.width, image.height, image.pixels.len()), (16, 8, 16 * 8 * 3));
        for (pixel, expected) in [(&image.pixels[..3], left), (&image.pixels[45..48], right)] {
            let far = pixel.iter().zip(expected).any(|(got, expected)| got.abs_diff(expected) > 6);
            assert!(!far, "{pixel:?}, expected about {expected:?}");
        }
    }
}

#[test]
fn errors_name_the_problem() {
    let good = jpeg_of(ExtendedColorType::L8, &[30], &[220]);
    let says = |file: &[u8], words: &str| {
        let error = decode(file).expect_err(words);
        assert!(error.contains(words), "{error}");
    };
    says(b"", "is empty");
    says(b"GIF89a", "is not a GIF that can be decoded");
    says(b"no image", "has unknown first bytes: expected BMP, GIF, JPEG");
    says(b"\0\0\0\x20ftypavif", "is AVIF: expected BMP, GIF, JPEG");
    says(&good[..good.len() - 8], "cut off");
    let png = png_of(ColorType::Grayscale, BitDepth::Eight, None, &[0; 6]);
    for length in 0..png.len() - 12 {
        assert!(decode(&png[..length]).is_err(), "the first {length} of {} bytes", png.len());
    }
}

/// The fixtures of `worker/tests/fixtures/generate_images.py`.
fn fixture(name: &str) -> Vec<u8> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images");
    std::fs::read(folder.join(name)).expect(name)
}

#[test]
fn images_have_the_pixels_that_pil_reads() {
    let orientations = (1..=8).map(|number| format!("orientation-{number}.jpg"));
    let exact = [
        "alpha.tiff",
        "alpha.webp",
        "animated.gif",
        "animated.webp",
        "bits.bmp",
        "bits.tiff",
        "deflate.tiff",
        "grey.pgm",
        "grey.tiff",
        "lossless.webp",
        "lzw.tiff",
        "palette-1.tiff",
        "palette-2.tiff",
        "palette-4.tiff",
        "palette.bmp",
        "palette.tiff",
        "plain.bmp",
        "plain.gif",
        "upright.png",
        "upright.tif",
        "upright.webp",
    ];
    let lossy = ["cmyk-without-adobe.jpg", "cmyk.jpg", "lossy.webp", "progressive.jpg", "ycck.jpg"];
    let lossy = lossy.into_iter().map(str::to_owned).chain(orientations).map(|name| (name, 4));
    for (name, most) in exact.into_iter().map(|name| (name.to_owned(), 0)).chain(lossy) {
        let image = decode(&fixture(&name)).unwrap_or_else(|error| panic!("{name} {error}"));
        let expected = decode(&fixture(&format!("{name}.ppm"))).expect("PPM");
        assert_eq!((image.width, image.height), (expected.width, expected.height), "{name}");
        let differences = image.pixels.iter().zip(&expected.pixels).map(|(got, expected)| got.abs_diff(*expected));
        let largest = differences.max().unwrap_or(u8::MAX);
        assert!(largest <= most, "{name} differs by {largest}");
    }
}

#[test]
fn a_cut_off_file_has_the_size_of_the_whole_or_is_an_error() {
    for name in ["grey.pgm", "lossless.webp", "lossy.webp", "lzw.tiff", "palette.bmp", "plain.gif", "upright.png"] {
        let file = fixture(name);
        let whole = decode(&file).expect(name);
        assert!(decode(&file[..file.len() / 2]).is_err(), "half of {name}");
        for length in 0..file.len() {
            if let Ok(image) = decode(&file[..length]) {
                assert_eq!((image.width, image.height), (whole.width, whole.height), "{length} bytes of {name}");
            }
        }
    }
}

#[test]
fn a_jpeg_can_lack_its_end_marker_but_nothing_else() {
    for name in ["orientation-1.jpg", "cmyk.jpg"] {
        let file = fixture(name);
        let whole = decode(&file);
        for missing in [1, 2] {
            assert_eq!(decode(&file[..file.len() - missing]), whole, "{name} without {missing} bytes");
        }
        for length in 2..file.len() - 2 {
            let image = decode(&file[..length]);
            // The last byte can be padding.
            assert!(image.is_err() || image == whole, "the first {length} bytes of {name}");
        }
        assert!(decode(&file[..file.len() - 12]).is_err(), "{name}");
    }
    // Later scans refine the pixels.
    let progressive = fixture("progressive.jpg");
    let error = decode(&progressive[..progressive.len() - 2]).expect_err("scans can be missing");
    assert_eq!(error, "is a JPEG that is cut off");
}

#[test]
fn oversized_images_are_rejected_before_allocation() {
    let mut png = png_of(ColorType::Rgb, BitDepth::Eight, None, &[0; 18]);
    // The width in IHDR, with the checksum over type and data.
    png[16..20].copy_from_slice(&10_000_u32.to_be_bytes());
    png[20..24].copy_from_slice(&10_000_u32.to_be_bytes());
    let sum = checksum(&png[12..29]);
    png[29..33].copy_from_slice(&sum.to_be_bytes());
    let [mut bmp, mut gif, mut webp] = ["plain.bmp", "plain.gif", "animated.webp"].map(fixture);
    [18, 22].into_iter().for_each(|at| bmp[at..at + 4].copy_from_slice(&10_000_u32.to_le_bytes()));
    [6, 8].into_iter().for_each(|at| gif[at..at + 2].copy_from_slice(&10_000_u16.to_le_bytes()));
    // 24-bit sizes of the canvas, less 1.
    [24, 27].into_iter().for_each(|at| webp[at..at + 3].copy_from_slice(&9_999_u32.to_le_bytes()[..3]));
    let ppm = b"P6 10000 10000 255\n".to_vec();
    for (name, file) in [("png", png), ("bmp", bmp), ("gif", gif), ("webp", webp), ("ppm", ppm)] {
        let error = decode(&file).expect_err(name);
        assert!(error.contains("is 10000x10000 pixels: expected"), "{name}: {error}");
    }
}

/// Found by `fuzz::gif_files`: frames were unlimited.
#[test]
fn a_large_frame_in_a_small_gif_is_rejected_before_allocation() {
    let mut file = fixture("plain.gif");
    // After the header and a palette of 64 colours: separator, left, top, width, height.
    let descriptor = 13 + 3 * 64;
    assert_eq!(file[descriptor], b',');
    file[descriptor + 5..descriptor + 9].fill(0x7f);
    let error = decode(&file).unwrap_err();
    assert!(error.contains("limit"), "{error}");
}

/// Found by `fuzz::webp_files`: the decoder allocated 1 GiB for a file of 820 bytes.
#[test]
fn an_exif_length_beyond_the_end_of_a_webp_is_an_error() {
    let mut file = fixture("upright.webp");
    let chunk = file.windows(4).position(|name| name == b"EXIF").unwrap();
    file[chunk + 7] = 0x40;
    assert_eq!(decode(&file).unwrap_err(), "is a WEBP that is cut off in its EXIF data");
}

/// The PNG CRC-32.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(!0, |sum: u32, byte| (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 * (sum & 1))))
}
