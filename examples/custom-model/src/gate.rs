//! A custom layer: a gate scales each channel of an image.
//!
//! ```text
//! forward    s = sigmoid(g + bias)                 y = s x
//! backward   dx = s dy     dz = s (1 - s) sum over pixels of x dy     dg = dz     dbias = sum over images of dz
//! ```
//!
//! Images `x` and `y` are `[batch, height, width, channels]`, gates `g` and `s` `[batch,
//! channels]`. This is the excitation of Hu, Shen and Sun (2018, "Squeeze-and-Excitation Networks",
//! equations 3 and 4).

use switchyard_worker::cpu::math::exp;
use switchyard_worker::cpu::ops::{in_pieces, rows};
use switchyard_worker::cpu::{Cpu, Element, with_format};
use switchyard_worker::nn::{
    Backward, Flow, Forward, Graph, Initial, InputGradient, Layer, ModelError, Needs, Role, Tensor,
};

/// Scales the channels of images by the sigmoid of a gate and a bias.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    /// Initial bias. 2 opens all gates to 0.88.
    pub open: f32,
}

impl Gate {
    /// Appends the layer as `NAME.bias`, for images `x` and gates `g`.
    ///
    /// # Errors
    /// `x` is not an image, or `g` does not have one number per image and channel.
    pub fn add(self, graph: &mut Graph, name: &str, x: Tensor, g: Tensor) -> Result<Tensor, ModelError> {
        let &[batch, height, width, channels] = graph.shape(x) else {
            return Err(graph.mismatch(name, x, "[batch, height, width, channels]"));
        };
        if graph.shape(g) != [batch, channels] {
            return Err(graph.mismatch(name, g, format!("[{batch}, {channels}]: a gate for each image and channel")));
        }
        let bias = graph.parameter(&format!("{name}.bias"), &[channels], Role::Vector, Initial::Constant(self.open));
        let layer = Scale { batch, pixels: height * width, channels };
        graph.add(name, layer, &[x, g], &[bias], &[], &[batch, height, width, channels])
    }
}

struct Scale {
    batch: usize,
    pixels: usize,
    channels: usize,
}

impl Layer for Scale {
    fn kind(&self) -> &'static str {
        "Gate"
    }

    fn needs(&self, _: &Cpu) -> Needs {
        let gates = self.batch * self.channels;
        Needs {
            // `g` is not needed once `s` is known, and `s` is saved.
            inputs: [true, false, false],
            saved: gates,
            backward_scratch: gates,
            // Other layers also read `x`, so its gradient can accumulate; only this layer uses `g`.
            flow: [Flow::Accumulate, Flow::Write, Flow::Write],
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let (cpu, bias) = (&cx.kernels.cpu, cx.parameters.master(0));
        let image = self.pixels * self.channels;
        with_format!(cx.output.format(), E => {
            let (x, g) = (cx.inputs[0].of::<E>(), cx.inputs[1].of::<E>());
            let pieces = (rows(cx.output.of::<E>(), image), rows(cx.saved, self.channels));
            // One image at a time, independent of the number of threads.
            in_pieces(cpu, self.batch, 1, pieces, |images, (y, s)| {
                let channels = self.channels;
                for (s, (g, bias)) in s.iter_mut().zip(g[images.start * channels..].iter().zip(bias)) {
                    *s = 1.0 / (1.0 + exp(-(g.get() + bias)));
                }
                let x = &x[images.start * image..images.end * image];
                for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
                    for ((y, x), s) in y.iter_mut().zip(x).zip(&*s) {
                        *y = E::of(x.get() * s);
                    }
                }
            });
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let cpu = &cx.kernels.cpu;
        let (channels, image) = (self.channels, self.pixels * self.channels);
        let (s, dz) = (&*cx.saved, &mut *cx.scratch);
        let [dx, dg, _] = &mut cx.d_inputs;
        with_format!(cx.d_output.format(), E => {
            let (x, dy) = (cx.inputs[0].of::<E>(), cx.d_output.shared().of::<E>());
            in_pieces(cpu, self.batch, 1, rows(dz, channels), |images, dz| {
                let pixels = images.start * image..images.end * image;
                let s = &s[images.start * channels..];
                gate_gradient(&x[pixels.clone()], &dy[pixels], s, dz);
            });
            if let Some((mut dx, add)) = dx.target() {
                in_pieces(cpu, self.batch, 1, rows(dx.of::<E>(), image), |images, dx| {
                    let dy = &dy[images.start * image..images.end * image];
                    image_gradient(dy, &s[images.start * channels..][..channels], dx, add);
                });
            }
            write_gate::<E>(dg, dz);
        });
        let (d_bias, accumulate) = cx.gradients.of(0);
        if !accumulate {
            d_bias.fill(0.0);
        }
        for dz in dz.chunks_exact(channels) {
            for (sum, dz) in d_bias.iter_mut().zip(dz) {
                *sum += dz;
            }
        }
    }
}

/// `dz` = `s (1 - s)` times the sum over an image's pixels of `x dy`.
fn gate_gradient<E: Element>(x: &[E], dy: &[E], s: &[f32], dz: &mut [f32]) {
    dz.fill(0.0);
    let channels = dz.len();
    for (x, dy) in x.chunks_exact(channels).zip(dy.chunks_exact(channels)) {
        for (dz, (x, dy)) in dz.iter_mut().zip(x.iter().zip(dy)) {
            *dz += x.get() * dy.get();
        }
    }
    for (dz, s) in dz.iter_mut().zip(s) {
        *dz *= s * (1.0 - s);
    }
}

/// `dx` = (or +=) `s dy`, for the pixels of an image.
fn image_gradient<E: Element>(dy: &[E], s: &[f32], dx: &mut [E], add: bool) {
    for (dx, dy) in dx.chunks_exact_mut(s.len()).zip(dy.chunks_exact(s.len())) {
        for (dx, (dy, s)) in dx.iter_mut().zip(dy.iter().zip(s)) {
            let before = if add { dx.get() } else { 0.0 };
            *dx = E::of(before + dy.get() * s);
        }
    }
}

fn write_gate<E: Element>(dg: &mut InputGradient<'_>, dz: &[f32]) {
    // `Flow::Write`: the gradient is never accumulated.
    if let Some((mut dg, _)) = dg.target() {
        for (dg, dz) in dg.of::<E>().iter_mut().zip(dz) {
            *dg = E::of(*dz);
        }
    }
}
