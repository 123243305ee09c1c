//! A directory with one subdirectory of JPEG and PNG files per class, decoded on demand.

use super::decode::{CHANNELS, decode};
use super::error::DataError;
use super::files::{self, Stamp};
use super::images::Images;
use super::part::{SampleError, Scratch};
use super::scale::{Size, to_square};
use super::split::{self, Block};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use switchyard_worker_contract::config::Files;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Leading bytes of a file that are hashed to choose its split.
const HEAD: u64 = 64 << 10;
const MAX_FILE: u64 = 256 << 20;
const EXTENSIONS: [&str; 3] = ["jpg", "jpeg", "png"];

/// An image file.
#[derive(Debug, Clone)]
struct File {
    /// Relative to the directory.
    path: Box<Path>,
    class: u32,
    stamp: Stamp,
}

/// The images of one split.
#[derive(Debug)]
pub(super) struct Folder {
    root: Arc<Path>,
    side: u32,
    files: Vec<File>,
}

/// The listed directory.
pub(super) struct Opened {
    pub train: Folder,
    pub validation: Option<Folder>,
    pub classes: u32,
    pub files: u64,
    pub empty_files: u64,
    pub bytes: u64,
    pub digest: Xxh3,
}

/// Lists the directory. The classes are the names of its subdirectories in order. If there is a
/// `train` subdirectory, its subdirectories are the classes, and `val` is the validation split.
/// Only files with a JPEG or PNG extension count. Decodes nothing yet.
pub(super) fn open(data: &Files, side: u32, fraction: f64) -> Result<Opened, DataError> {
    let root = files::absolute(Path::new(&data.path));
    if !files::kind(&root)?.is_dir() {
        return Err(DataError::format(&root, "a file", "a directory with a directory for each class"));
    }
    if side == 0 {
        let expected = "the height and width of the images, for example 224";
        return Err(DataError::value("spec.engine.data.images.size", 0, expected));
    }
    let parted = root.join("train").is_dir();
    let (mut paths, mut validation) = (Vec::new(), Vec::new());
    for path in files::find(&root, data)?.into_iter().filter(|path| is_image(path)) {
        let relative = path.strip_prefix(&root).unwrap_or(&path).to_owned();
        let Some((part, class)) = place(&relative, parted) else {
            let expected =
                if parted { "it in `train/CLASS` or `val/CLASS`" } else { "it in a directory for its class" };
            return Err(DataError::format(&path, "an image outside of a class", expected));
        };
        match part.as_deref() {
            None | Some("train") => paths.push((relative, class)),
            Some("val") => validation.push((relative, class)),
            // Ignore other splits, such as `test`.
            Some(_) => {}
        }
    }
    let names: BTreeSet<String> = paths.iter().map(|(_, class)| class.clone()).collect();
    let names: Vec<String> = names.into_iter().collect();
    let mut listing = Listing { root: Arc::from(root.as_path()), names, empty: 0, bytes: 0, digest: Xxh3::new() };
    let mut train = listing.files(paths)?;
    let mut validation = listing.files(validation)?;
    if train.is_empty() {
        return Err(DataError::format(&root, "no image that is not empty", ".jpg, .jpeg or .png files"));
    }
    let has_own = !validation.is_empty();
    if !has_own && fraction > 0.0 {
        (train, validation) = listing.divide(train, fraction)?;
    }
    let files = (train.len() + validation.len()) as u64;
    let Listing { root, names, empty, bytes, digest } = listing;
    let validation = (!validation.is_empty()).then(|| Folder { root: Arc::clone(&root), side, files: validation });
    let train = Folder { root, side, files: train };
    Ok(Opened { train, validation, classes: names.len() as u32, files, empty_files: empty, bytes, digest })
}

fn is_image(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known))
}

/// The split (if the directory has splits) and the class of a path.
fn place(relative: &Path, parted: bool) -> Option<(Option<String>, String)> {
    let mut names = relative.parent()?.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    });
    let part = if parted { Some(names.next()?) } else { None };
    Some((part, names.next()?))
}

/// State collected while listing the files.
struct Listing {
    root: Arc<Path>,
    /// Class names, in order.
    names: Vec<String>,
    empty: u64,
    bytes: u64,
    digest: Xxh3,
}

impl Listing {
    /// The non-empty files.
    fn files(&mut self, paths: Vec<(PathBuf, String)>) -> Result<Vec<File>, DataError> {
        let mut files = Vec::with_capacity(paths.len());
        self.digest.update(&(paths.len() as u64).to_le_bytes());
        for (path, class) in paths {
            let whole = self.root.join(&path);
            let class = self.names.binary_search(&class).map_err(|_| {
                DataError::format(&whole, format!("class `{class}`"), "a class that has images in `train`")
            })?;
            let stamp = Stamp::at(&whole)?;
            if stamp.len == 0 {
                self.empty += 1;
                continue;
            }
            self.bytes += stamp.len;
            // Reading all images would take as long as an epoch, so the digest covers only names
            // and lengths: a different copy of the data almost always differs in some length.
            self.digest.update(path.as_os_str().as_encoded_bytes());
            self.digest.update(&stamp.len.to_le_bytes());
            files.push(File { path: path.into_boxed_path(), class: class as u32, stamp });
        }
        Ok(files)
    }

    /// Splits the files by a hash of their first bytes and length.
    fn divide(&mut self, files: Vec<File>, fraction: f64) -> Result<(Vec<File>, Vec<File>), DataError> {
        let mut blocks = Vec::with_capacity(files.len());
        let mut head = Vec::new();
        for (index, file) in files.iter().enumerate() {
            let path = self.root.join(&file.path);
            head.clear();
            let opened = files::open(&path).map_err(|error| DataError::unreadable(&path, error))?;
            opened.take(HEAD).read_to_end(&mut head).map_err(|error| DataError::unreadable(&path, error))?;
            head.extend_from_slice(&file.stamp.len.to_le_bytes());
            let hash = xxh3_64(&head);
            self.digest.update(&hash.to_le_bytes());
            blocks.push(Block { range: index..index + 1, hash, validation: false });
        }
        split::choose(&mut blocks, fraction);
        if split::balance(&mut blocks, 1).is_none() {
            let (got, sample) = (files.len() as u64, "an image".to_owned());
            return Err(DataError::NoRoomForValidation { got, item: "images", sample });
        }
        let mut sides = (Vec::new(), Vec::new());
        for (file, block) in files.into_iter().zip(blocks) {
            if block.validation { sides.1.push(file) } else { sides.0.push(file) }
        }
        self.digest.update(&(sides.1.len() as u64).to_le_bytes());
        Ok(sides)
    }
}

impl Folder {
    /// Reads a file into `bytes`.
    fn read(&self, path: &Path, stamp: &Stamp, bytes: &mut Vec<u8>) -> Result<(), SampleError> {
        if stamp.len > MAX_FILE {
            return Err(SampleError::Unreadable(format!("has {} bytes: expected at most {MAX_FILE}", stamp.len)));
        }
        let read = files::retry(path, || {
            let file = files::open(path)?;
            bytes.clear();
            (&file).take(stamp.len).read_to_end(bytes)?;
            Ok(file)
        });
        let file = read.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                SampleError::Data(DataError::Changed { path: path.to_owned(), what: "it is gone".to_owned() })
            }
            _ if files::is_final(&error) => SampleError::Unreadable(format!("cannot be opened ({error})")),
            _ => SampleError::Data(DataError::unreadable_now(path, error)),
        })?;
        stamp.check(path, &file)?;
        Ok(())
    }
}

impl Images for Folder {
    fn len(&self) -> u64 {
        self.files.len() as u64
    }

    fn image<'a>(&'a self, sample: u64, scratch: &'a mut Scratch) -> Result<(&'a [u8], u32), SampleError> {
        let File { path, class, stamp } = &self.files[sample as usize];
        let path = self.root.join(path);
        let named = |fault| match fault {
            SampleError::Unreadable(what) => SampleError::Unreadable(format!("{} {what}", path.display())),
            SampleError::Data(error) => SampleError::Data(error),
        };
        self.read(&path, stamp, &mut scratch.bytes).map_err(named)?;
        let image = decode(&scratch.bytes).map_err(|what| named(SampleError::Unreadable(what)))?;
        let side = self.side as usize;
        scratch.pixels.resize(side * side * CHANNELS, 0);
        let size = Size { height: image.height, width: image.width, channels: CHANNELS };
        to_square(&image.pixels, size, side, &mut scratch.rows, &mut scratch.pixels);
        Ok((&scratch.pixels, *class))
    }

    fn memory_bytes(&self) -> u64 {
        let paths: usize = self.files.iter().map(|file| file.path.as_os_str().len()).sum();
        (paths + self.files.capacity() * size_of::<File>()) as u64
    }
}
