//! Input samples.

use super::{Lowering, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Span, Work};
use crate::lowering::refused::Reason;
use crate::lowering::target::Computed;
use crate::nn::layers::{Features, Pixels};
use crate::nn::plan::NodePlan;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::input::Input;

pub(super) fn features(features: &Features, format: Format) -> Result<Input, Reason> {
    Ok(Input::new(rows(features.width, format)?, size(features.rows)?, None)?)
}

/// `is_normalised`: whether the reader has normalised the images, so that they are floats instead
/// of bytes.
pub(super) fn pixels(pixels: &Pixels, format: Format, is_normalised: bool) -> Result<Input, Reason> {
    let channels = pixels.channels.len();
    let count = size(pixels.count * channels / pixels.width)?;
    let of_bytes = if is_normalised { None } else { Some(size(channels)?) };
    Ok(Input::new(rows(pixels.width, format)?, count, of_bytes)?)
}

/// Mean and deviation of each channel, as bits.
pub(in crate::lowering) fn constants(pixels: &Pixels) -> Vec<u32> {
    pixels.channels.iter().flat_map(|&(mean, deviation)| [mean.to_bits(), deviation.to_bits()]).collect()
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn features(&mut self, of: &Features, regions: &NodePlan) -> Result<(), Reason> {
        self.input(features(of, self.format)?, Memory::Values, None, regions)
    }

    pub(super) fn pixels(&mut self, of: &Pixels, computed: &Computed, regions: &NodePlan) -> Result<(), Reason> {
        let input = pixels(of, self.format, self.is_normalised)?;
        if self.is_normalised {
            return self.input(input, Memory::Values, None, regions);
        }
        let channels = self.floats(Memory::Constants, computed.constant, constants(of).len());
        self.input(input, Memory::Pixels, Some(channels), regions)
    }

    fn input(&mut self, input: Input, memory: Memory, channels: Option<M>, regions: &NodePlan) -> Result<(), Reason> {
        let from = (self.place)(Span { memory, at: 0, bytes: input.delivered_bytes() });
        let call = input.call(self.target.blocks, from, channels, self.arena(&regions.output))?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }
}
