//! Injected device faults, which are not the program's mistake.

/// Environment variable with a comma-separated list of faults.
pub const VARIABLE: &str = "SWITCHYARD_REFERENCE_FAULT";

/// Accepted faults, for the error message.
const EXPECTED: &str = "out-of-memory:N, launch:N, lost:N, hang:N, wrong:N, stale:N, exit, busy, cublaslt-bare, cudnn-version:N, cudnn-refused:KIND, cudnn-untaken:KIND, cudnn-fails:N, nccl-version:N, nccl-init:RANK, \
                        nccl-absent:RANK, nccl-error:RANK.N, nccl-silent:RANK.N, xid:GPU.N.XID, ecc:N, slowed:REASONS, celsius:N, \
                        utilization:PERCENT, lanes:N, process:PID.MEBIBYTES, driver-version:N, capability:N or mig";

/// Injected faults. Calls are numbered from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// This allocation runs out of memory.
    pub(crate) out_of_memory: Option<u64>,
    /// This launch fails when it runs, and so do all later calls.
    pub(crate) launch: Option<u64>,
    /// The device is lost when this launch runs.
    pub(crate) lost: Option<u64>,
    /// This launch never ends.
    pub(crate) hang: Option<u64>,
    /// From this product or convolution on, the first element of each result is too large by one.
    pub(crate) wrong: Option<u64>,
    /// Of all copies of this many bytes from pinned memory to the device, only the first arrives,
    /// as if its bytes were baked into a graph: later launches see stale data.
    pub(crate) stale: Option<u64>,
    /// The driver's exit handler never returns.
    pub(crate) exit: bool,
    /// Another process has exclusive use of the device.
    pub(crate) busy: bool,
    /// cuBLASLt has no algorithm for products with an epilogue.
    pub(crate) cublaslt_bare: bool,
    /// Version of cuDNN.
    pub(crate) cudnn_version: Option<u64>,
    /// cuDNN has no engine for operations of this kind; 0: of any kind.
    pub(crate) cudnn_refused: Option<u64>,
    /// cuDNN rejects serialized plans for operations of this kind; 0: of any kind.
    pub(crate) cudnn_untaken: Option<u64>,
    /// This execution of a cuDNN graph fails when it is called.
    pub(crate) cudnn_fails: Option<u64>,
    /// Version of NCCL.
    pub(crate) nccl_version: Option<u64>,
    /// This rank's communicators fail immediately.
    pub(crate) nccl_init: Option<u64>,
    /// This rank never joins its communicators.
    pub(crate) nccl_absent: Option<u64>,
    /// On this rank, this all-reduce of each communicator fails asynchronously.
    pub(crate) nccl_error: Option<(u64, u64)>,
    /// On this rank, the data of this all-reduce of each communicator is never sent.
    pub(crate) nccl_silent: Option<(u64, u64)>,
    /// On this GPU, the driver reports this XID when this launch runs.
    pub(crate) xid: Option<(u64, u64, u64)>,
    /// When this launch runs, memory gets an uncorrectable ECC error.
    pub(crate) ecc: Option<u64>,
    /// Reasons for reduced clocks: bits of `nvmlClocksThrottleReasons`.
    pub(crate) slowed: Option<u64>,
    /// GPU temperature in degrees Celsius.
    pub(crate) celsius: Option<u64>,
    /// Percent of the time in which the GPU is busy.
    pub(crate) utilization: Option<u64>,
    /// Active lanes of the PCIe link, of 16.
    pub(crate) lanes: Option<u64>,
    /// Another process and its MiB of memory, on every GPU.
    pub(crate) process: Option<(u64, u64)>,
    /// CUDA version of the driver.
    pub(crate) driver_version: Option<u64>,
    /// Compute capability as `major * 10 + minor`.
    pub(crate) capability: Option<u64>,
    /// MIG is enabled on each GPU.
    pub(crate) mig: bool,
}

/// Parses the environment variable.
pub(crate) fn requested() -> Result<Faults, String> {
    Faults::parse(&std::env::var(VARIABLE).unwrap_or_default())
}

impl Faults {
    pub(crate) fn parse(text: &str) -> Result<Faults, String> {
        let mut faults = Faults::default();
        for one in text.split(',').filter(|one| !one.is_empty()) {
            faults.add(one).ok_or_else(|| format!("{VARIABLE}: `{one}`, expected {EXPECTED}"))?;
        }
        Ok(faults)
    }

    fn add(&mut self, one: &str) -> Option<()> {
        match one {
            "busy" => self.busy = true,
            "cublaslt-bare" => self.cublaslt_bare = true,
            "exit" => self.exit = true,
            "mig" => self.mig = true,
            _ => return self.numbered(one),
        }
        Some(())
    }

    fn numbered(&mut self, one: &str) -> Option<()> {
        let (name, value) = one.split_once(':')?;
        let number = || value.parse().ok().map(Some);
        let of_rank = || {
            let (rank, number) = value.split_once('.')?;
            Some(Some((rank.parse().ok()?, number.parse().ok()?)))
        };
        let of_gpu = || {
            let (gpu, rest) = value.split_once('.')?;
            let (launch, number) = rest.split_once('.')?;
            Some(Some((gpu.parse().ok()?, launch.parse().ok()?, number.parse().ok()?)))
        };
        match name {
            "out-of-memory" => self.out_of_memory = number()?,
            "launch" => self.launch = number()?,
            "lost" => self.lost = number()?,
            "hang" => self.hang = number()?,
            "wrong" => self.wrong = number()?,
            "stale" => self.stale = number()?,
            "cudnn-version" => self.cudnn_version = number()?,
            "cudnn-refused" => self.cudnn_refused = number()?,
            "cudnn-untaken" => self.cudnn_untaken = number()?,
            "cudnn-fails" => self.cudnn_fails = number()?,
            "nccl-version" => self.nccl_version = number()?,
            "nccl-init" => self.nccl_init = number()?,
            "nccl-absent" => self.nccl_absent = number()?,
            "nccl-error" => self.nccl_error = of_rank()?,
            "nccl-silent" => self.nccl_silent = of_rank()?,
            "xid" => self.xid = of_gpu()?,
            "ecc" => self.ecc = number()?,
            "slowed" => self.slowed = number()?,
            "celsius" => self.celsius = number()?,
            "utilization" => self.utilization = number()?,
            "lanes" => self.lanes = number()?,
            "process" => self.process = of_rank()?,
            "driver-version" => self.driver_version = number()?,
            "capability" => self.capability = number()?,
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::Faults;

    #[test]
    fn faults_are_parsed_and_unknown_ones_refused() {
        let faults = Faults::parse("launch:3,wrong:4,busy,nccl-error:1.2").unwrap();
        let expected =
            Faults { launch: Some(3), wrong: Some(4), busy: true, nccl_error: Some((1, 2)), ..Faults::default() };
        assert_eq!(faults, expected);
        assert_eq!(Faults::parse(""), Ok(Faults::default()));
        for wrong in ["launch", "launch:x", "fire:1", "busy:1", "nccl-error:1", "nccl-silent:1.x", "xid:1.2", "mig:1"] {
            assert!(Faults::parse(wrong).unwrap_err().contains(&format!("`{wrong}`, expected")), "{wrong}");
        }
    }
}
