//! The section about GPU kernels.

use super::elements::{Body, paragraph, table};
use crate::report::model::{KernelRow, Kernels, Report};
use switchyard_core::units::{binary, counted, three_digits};

pub(super) fn kernels(report: &Report) -> Body {
    let Some(kernels) = &report.kernels else {
        return Err("no kernel was timed: GPU runs time kernels in the steps of `engine.profile`");
    };
    let percent = |share: f64| format!("{share:.0} %");
    let mut page = paragraph(&words(kernels));
    let mut columns = vec!["part", "kernel", "launches", "ms", "share", "bytes", "FLOP", "tensor cores"];
    if kernels.device.is_some() {
        columns.extend(["least ms", "of the time", "bound by"]);
    }
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let row = |row: &KernelRow| {
        let mut cells = vec![
            row.part.clone(),
            row.name.clone(),
            three_digits(row.launches),
            three_digits(row.ms),
            percent(row.percent),
            binary(row.bytes as u64),
            if row.flops > 0.0 { format!("{:.3e}", row.flops) } else { "-".into() },
            known(row.tensor_percent.map(percent)),
        ];
        if kernels.device.is_some() {
            cells.extend([
                known(row.floor_ms.map(three_digits)),
                known(row.floor_percent.map(percent)),
                known(row.bound.clone()),
            ]);
        }
        cells
    };
    page.push_str(&table("Kernels of a step", &columns, &kernels.rows.iter().map(row).collect::<Vec<_>>()));
    Ok(page)
}

fn words(kernels: &Kernels) -> String {
    let ms = three_digits;
    let mut text = format!(
        "{} of rank {}, in {} whose works were queued one by one: {} launches take {} ms, and {} ms lie between them (the longest gap {} ms). \
         Beside them {} of batches are copied to the GPU in {} ms.",
        kernels.gpu,
        kernels.rank,
        counted(kernels.profiled_steps, "profiled step"),
        three_digits(kernels.launches),
        ms(kernels.kernel_ms),
        ms(kernels.gap_ms),
        ms(kernels.longest_gap_ms),
        binary(kernels.copied_bytes as u64),
        ms(kernels.copy_ms),
    );
    text.push_str(&format!(" In the mean step of the run the GPU is idle for {} ms.", ms(kernels.idle_ms)));
    let mut share = |value: Option<f64>, words: &str| {
        if let Some(value) = value {
            text.push_str(&format!(" {value:.0} % {words}."));
        }
    };
    share(kernels.tensor_percent, "of the FLOP are in products that tensor cores can do as they lie");
    share(kernels.half_percent, "of the time is in launches whose tensors have 16 bits");
    if let Some(device) = &kernels.device {
        share(
            kernels.floor_percent,
            &format!("of the time is what the launches need at least by the rates of {device}"),
        );
        share(kernels.utilization_percent, "of its rate of products is used in the mean step (MFU)");
    }
    text
}
