//! Converts host samples to tensor rows.

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
    /// Channels of byte images; `None` for f32 values.
    channels: Option<u32>,
}

impl Input {
    /// `channels` of byte images, whose pixels do not straddle rows; `None` for f32 values.
    ///
    /// # Errors
    /// The kernel does not support the width or pitch.
    pub fn new(rows: Rows, count: u32, channels: Option<u32>) -> Result<Input, Error> {
        rows.check("input")?;
        let max_rows = (1 << 31) / rows.width;
        let is_whole = channels.is_none_or(|channels| channels > 0 && rows.width.is_multiple_of(channels));
        if !(1..=max_rows).contains(&count) || !is_whole {
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

    /// Bytes delivered by the host, rounded up to whole words; the padding is ignored.
    pub fn delivered_bytes(&self) -> usize {
        let numbers = self.count as usize * self.rows.width as usize;
        if self.channels.is_some() { numbers.next_multiple_of(4) } else { 4 * numbers }
    }

    /// `to` = the converted samples of `from`. `channels`: for images, each channel's mean and
    /// deviation as `f32`. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small, or `channels` is given without images or missing for images.
    pub fn call<M: Memory>(&self, max_blocks: u32, from: M, channels: Option<M>, to: M) -> Result<Call<M>, Error> {
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
            blocks: vectors.div_ceil(THREADS).min(max_blocks).max(1),
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
