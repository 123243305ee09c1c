//! A directory with one subdirectory of image files per class, decoded on demand.

use super::decode::{CHANNELS, EXTENSIONS, decode};
use super::error::DataError;
use super::files::{self, Links, Stamp};
use super::images::Images;
use super::part::{SampleError, Scratch};
use super::scale::{Size, to_square};
use super::scan::Scan;
use super::skipped::{Reason, SkippedFiles};
use super::split::{self, Block};
use std::collections::BTreeSet;
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_checkpoint::disk::is_final;
use switchyard_worker_contract::config::Files;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Leading bytes of a file that are hashed to choose its split.
const HEAD: u64 = 64 << 10;
const MAX_FILE: u64 = 256 << 20;

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
    /// Of both splits.
    files: Arc<[File]>,
    /// Indices of this split's files.
    chosen: Vec<u32>,
}

/// A listed directory.
pub(super) enum Found {
    Split(Box<Opened>),
    Unsplit(Box<Unsplit>),
}

/// A directory whose images are divided by their content.
pub(super) struct Unsplit {
    root: Arc<Path>,
    side: u32,
    fraction: f64,
    files: Arc<[File]>,
    classes: Vec<String>,
    skipped: SkippedFiles,
    bytes: u64,
    /// Of names and lengths.
    digest: Xxh3,
}

/// The images of a directory in their splits.
pub(super) struct Opened {
    pub train: Folder,
    pub validation: Option<Folder>,
    /// Names of the classes, in order.
    pub classes: Vec<String>,
    pub files: u64,
    pub skipped: SkippedFiles,
    pub bytes: u64,
    pub digest: u128,
}

/// Lists the directory, also through links to directories. The classes are the names of its
/// subdirectories in order. If there is a `train` subdirectory with subdirectories, those are the
/// classes, and `val` is the validation split. Only files with the extension of an image count.
/// Decodes nothing yet.
pub(super) fn open(data: &Files, side: u32, fraction: f64) -> Result<Found, DataError> {
    let root = files::absolute(Path::new(&data.path));
    if !files::kind(&root)?.is_dir() {
        return Err(DataError::format(&root, "a file", "a directory with a directory for each class"));
    }
    if side == 0 {
        let expected = "the height and width of the images, for example 224";
        return Err(DataError::value("spec.engine.data.images.size", 0, expected));
    }
    let found = files::find(&root, data, Links::Follow)?;
    // Otherwise `train` is the name of a class.
    let parted = found.directories.iter().any(|path| path.parent() == Some(Path::new("train")));
    let mut listing =
        Listing { root: Arc::from(root.as_path()), skipped: found.skipped, bytes: 0, digest: Xxh3::new() };
    let (mut paths, mut validation) = (Vec::new(), Vec::new());
    for path in found.files {
        let relative = path.strip_prefix(&root).unwrap_or(&path).to_owned();
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        if !EXTENSIONS.contains(&extension.as_str()) {
            listing.skipped.add(&relative, Reason::Extension(extension));
            continue;
        }
        let Some((part, class)) = place(&relative, parted) else {
            let expected =
                if parted { "it in `train/CLASS` or `val/CLASS`" } else { "it in a directory for its class" };
            return Err(DataError::format(&path, "an image outside of a class", expected));
        };
        match part.as_deref() {
            None | Some("train") => paths.push((relative, class)),
            Some("val") => validation.push((relative, class)),
            Some(part) => listing.skipped.add(&relative, Reason::Part(part.to_owned())),
        }
    }
    let train = listing.stamped(paths)?;
    let validation = listing.stamped(validation)?;
    let names: BTreeSet<String> = train.iter().map(|(_, class, _)| class.clone()).collect();
    let names: Vec<String> = names.into_iter().collect();
    let parent = Path::new(if parted { "train" } else { "" });
    for directory in found.directories.iter().filter(|directory| directory.parent() == Some(parent)) {
        let class = directory.file_name().unwrap_or_default().to_string_lossy();
        // The patterns can exclude a whole class.
        let is_excluded = || {
            let excluded = found.with_unselected.iter().any(|unselected| unselected.starts_with(directory));
            excluded && listing.skipped.below(directory).is_empty()
        };
        if names.binary_search_by(|name| name.as_str().cmp(&class)).is_err() && !is_excluded() {
            return Err(listing.without_image(directory, &format!("class `{class}` has no image")));
        }
    }
    if train.is_empty() {
        return Err(listing.without_image(Path::new(""), "no image that is not empty"));
    }
    let mut files = listing.files(train, &names)?;
    let own = listing.files(validation, &names)?;
    let (first, has_own) = (files.len() as u32, !own.is_empty());
    files.extend(own);
    let files: Arc<[File]> = files.into();
    let Listing { root, skipped, bytes, digest } = listing;
    if !has_own && fraction > 0.0 {
        let unsplit = Unsplit { root, side, fraction, files, classes: names, skipped, bytes, digest };
        return Ok(Found::Unsplit(Box::new(unsplit)));
    }
    let last = files.len() as u32;
    let part = |chosen: Range<u32>| Folder {
        root: Arc::clone(&root),
        side,
        files: Arc::clone(&files),
        chosen: chosen.collect(),
    };
    Ok(Found::Split(Box::new(Opened {
        train: part(0..first),
        validation: has_own.then(|| part(first..last)),
        classes: names,
        files: last.into(),
        skipped,
        bytes,
        digest: digest.digest128(),
    })))
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
    skipped: SkippedFiles,
    bytes: u64,
    digest: Xxh3,
}

impl Listing {
    /// The non-empty files, with their classes.
    fn stamped(&mut self, paths: Vec<(PathBuf, String)>) -> Result<Vec<(PathBuf, String, Stamp)>, DataError> {
        let mut files = Vec::with_capacity(paths.len());
        for (path, class) in paths {
            let stamp = Stamp::at(&self.root.join(&path))?;
            match stamp.len {
                0 => self.skipped.add(&path, Reason::Empty),
                _ => files.push((path, class, stamp)),
            }
        }
        Ok(files)
    }

    /// The error for a directory without an image, with its files that are not read.
    fn without_image(&self, directory: &Path, what: &str) -> DataError {
        let reasons: Vec<String> = self.skipped.below(directory).iter().map(ToString::to_string).collect();
        let reasons = if reasons.is_empty() { "it has no files".to_owned() } else { reasons.join("; ") };
        let expected = format!("at least one .{} file, or the directory in exclude", EXTENSIONS.join(", ."));
        DataError::format(&self.root.join(directory), format!("{what} ({reasons})"), expected)
    }

    /// Numbers the classes.
    fn files(&mut self, stamped: Vec<(PathBuf, String, Stamp)>, names: &[String]) -> Result<Vec<File>, DataError> {
        self.digest.update(&(stamped.len() as u64).to_le_bytes());
        let mut files = Vec::with_capacity(stamped.len());
        for (path, class, stamp) in stamped {
            let class = names.binary_search(&class).map_err(|_| {
                let expected = "a class that has images in `train`";
                DataError::format(&self.root.join(&path), format!("class `{class}`"), expected)
            })?;
            self.bytes += stamp.len;
            // Reading all images would take as long as an epoch, so the digest covers only names
            // and lengths: a different copy of the data almost always differs in some length.
            self.digest.update(path.as_os_str().as_encoded_bytes());
            self.digest.update(&stamp.len.to_le_bytes());
            files.push(File { path: path.into_boxed_path(), class: class as u32, stamp });
        }
        Ok(files)
    }
}

impl Unsplit {
    pub(super) fn len(&self) -> u64 {
        self.files.len() as u64
    }

    /// Digest of names and lengths.
    pub(super) fn digest(&self) -> u128 {
        self.digest.digest128()
    }

    /// Hashes the first bytes of these files, and their lengths.
    pub(super) fn hashes(&self, files: impl Iterator<Item = u64>) -> Result<Vec<u64>, DataError> {
        let mut head = Vec::new();
        let hash = |index: u64| {
            let file = &self.files[index as usize];
            let path = self.root.join(&file.path);
            head.clear();
            let opened = files::open(&path).map_err(|error| DataError::unreadable(&path, error))?;
            opened.take(HEAD).read_to_end(&mut head).map_err(|error| DataError::unreadable(&path, error))?;
            head.extend_from_slice(&file.stamp.len.to_le_bytes());
            Ok(xxh3_64(&head))
        };
        files.map(hash).collect()
    }

    /// Splits the files by their hashes. `read` counts files.
    pub(super) fn scan(&self, read: &AtomicU64) -> Result<Scan, DataError> {
        let mut digest = self.digest.clone();
        let hashes = self.hashes((0..self.len()).inspect(|_| {
            read.fetch_add(1, Ordering::Relaxed);
        }))?;
        let block = |(index, hash): (usize, u64)| {
            digest.update(&hash.to_le_bytes());
            Block { range: index..index + 1, hash, validation: false }
        };
        let mut blocks: Vec<Block> = hashes.into_iter().enumerate().map(block).collect();
        split::choose(&mut blocks, self.fraction);
        if split::balance(&mut blocks, 1).is_none() {
            let (got, sample) = (self.len(), "an image".to_owned());
            return Err(DataError::NoRoomForValidation { got, item: "images", sample });
        }
        let validation = blocks.iter().filter(|block| block.validation).count();
        digest.update(&(validation as u64).to_le_bytes());
        Ok(Scan::new(digest.digest128(), &blocks))
    }

    /// The images in the splits of a scan.
    pub(super) fn split(&self, scan: &Scan) -> Opened {
        let part = |side: bool| Folder {
            root: Arc::clone(&self.root),
            side: self.side,
            files: Arc::clone(&self.files),
            chosen: (0..self.files.len() as u32)
                .filter(|file| scan.is_for_validation((*file).into()) == side)
                .collect(),
        };
        Opened {
            train: part(false),
            validation: Some(part(true)),
            classes: self.classes.clone(),
            files: self.len(),
            skipped: self.skipped.clone(),
            bytes: self.bytes,
            digest: scan.digest(),
        }
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
            _ if is_final(&error) => SampleError::Unreadable(format!("cannot be opened ({error})")),
            _ => SampleError::Data(DataError::unreadable_now(path, error)),
        })?;
        stamp.check(path, &file)?;
        Ok(())
    }
}

impl Images for Folder {
    fn len(&self) -> u64 {
        self.chosen.len() as u64
    }

    fn image<'a>(&'a self, sample: u64, scratch: &'a mut Scratch) -> Result<(&'a [u8], u32), SampleError> {
        let File { path, class, stamp } = &self.files[self.chosen[sample as usize] as usize];
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
        let paths = self.chosen.iter().map(|file| self.files[*file as usize].path.as_os_str().len());
        (paths.sum::<usize>() + self.chosen.len() * (size_of::<File>() + size_of::<u32>())) as u64
    }
}
