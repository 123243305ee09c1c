//! Samples of the host as rows of a tensor.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "input.cu", text: include_str!("input.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// `count` rows of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    rows: Rows,
    count: u32,
    /// Of images as bytes; `None`: numbers of 32 bits.
    channels: Option<u32>,
}

impl Input {
    /// `channels` of images as bytes, whose pixels do not straddle rows; `None` for numbers of 32 bits.
    ///
    /// # Errors
    /// A width or pitch that the kernel cannot have.
    pub fn new(rows: Rows, count: u32, channels: Option<u32>) -> Result<Input, Error> {
        rows.check("input")?;
        let most = (1 << 31) / rows.width;
        let is_whole = channels.is_none_or(|channels| channels > 0 && rows.width.is_multiple_of(channels));
        if !(1..=most).contains(&count) || !is_whole {
            let channels = channels.map_or(String::new(), |channels| format!(" of pixels with {channels} channels"));
            let text = format!(
                "{count} rows of width {}{channels}, expected at least one, whole pixels and 2^31 numbers",
                rows.width
            );
            return Err(Error::refused("input", text));
        }
        Ok(Input { rows, count, channels })
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.push(format!("-DIS_IMAGE={}", u32::from(self.channels.is_some())));
        program.definitions.push(format!("-DCHANNELS={}", self.channels.unwrap_or(1)));
        program
    }

    /// Size of what the host delivers, in whole words: what is behind the last byte of an image does not matter.
    pub fn delivered_bytes(&self) -> usize {
        let numbers = self.count as usize * self.rows.width as usize;
        if self.channels.is_some() { numbers.next_multiple_of(4) } else { 4 * numbers }
    }

    /// `to` = the samples of `from`. `channels`: of images, for each channel its mean and its deviation as `f32`. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small, or channels without images or the reverse.
    pub fn call<M: Memory>(&self, most: u32, from: M, channels: Option<M>, to: M) -> Result<Call<M>, Error> {
        if channels.is_some() != self.channels.is_some() {
            return Err(Error::refused("input", "mean and deviation, expected with images and not without"));
        }
        let mut memory = vec![("from", from, self.delivered_bytes()), ("to", to, self.rows.bytes(self.count))];
        memory.extend(channels.map(|channels| ("channels", channels, 8 * self.channels.unwrap_or(0) as usize)));
        sizes("input", &memory)?;
        let vectors = self.count * self.rows.vectors();
        Ok(Call {
            program: self.program(),
            kernel: "input",
            blocks: vectors.div_ceil(THREADS).min(most).max(1),
            threads: THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(from),
                channels.map_or(Argument::Absent, Argument::Reads),
                Argument::Writes(to),
                Argument::Int(self.count),
            ],
        })
    }
}
