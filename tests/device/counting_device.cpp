// A PyTorch device for tests. Its memory is host memory, its kernels are the CPU's, and it counts what a GPU would pay for:
// bytes allocated, copies to and from the host, and reads for which the host waits. An operation that mixes tensors of the
// device and of the CPU is an error, as on a GPU.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <set>

namespace {

using at::IValue;
using at::Tensor;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kTotalBytes = 1 << 30;

// Counts -------------------------------------------------------------------------------------------------------------------

std::atomic<int64_t> current_bytes{0}, cached_bytes{0}, peak_bytes{0}, allocations{0}, waits{0};
std::atomic<int64_t> to_device{0}, to_device_bytes{0}, to_host{0}, to_host_bytes{0};

PyObject* on_wait = nullptr; // called with the operation's name, on the thread that waits

void waited(const std::string& name) {
  waits++;
  if (on_wait == nullptr)
    return;
  pybind11::gil_scoped_acquire gil;
  const pybind11::handle call(on_wait);
  call(pybind11::str(name));
}

// Memory -------------------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  current_bytes -= static_cast<int64_t>(block->bytes);
  cached_bytes += static_cast<int64_t>(block->bytes);
  c10::GetCPUAllocator()->raw_deallocate(block->data);
  delete block;
}

struct CountingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, c10::Device(kDevice, 0)};
    auto* block = new Block{c10::GetCPUAllocator()->raw_allocate(bytes), bytes};
    const int64_t now = current_bytes += static_cast<int64_t>(bytes);
    int64_t peak = peak_bytes;
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
    int64_t cached = cached_bytes;
    while (!cached_bytes.compare_exchange_weak(cached, std::max<int64_t>(0, cached - static_cast<int64_t>(bytes)))) {
    }
    allocations++;
    return {block->data, block, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context is not the data: raw allocation is refused
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    cached_bytes = 0;
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[0].current = current_bytes;
      (*each)[0].peak = peak_bytes;
    }
    stats.allocation[0].allocated = allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    peak_bytes = current_bytes.load();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {static_cast<size_t>(kTotalBytes - current_bytes - cached_bytes), static_cast<size_t>(kTotalBytes)};
  }
};

CountingAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// The device: one, with one stream, on which everything is done at once ------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return {kDevice, 0};
  }
  c10::Device getDevice() const override {
    return {kDevice, 0};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "invalid device ordinal ", static_cast<int>(device.index()));
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDevice, 0});
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return getStream({kDevice, 0});
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    waited("synchronizeStream");
  }
  void synchronizeEvent(void*) const override {
    waited("synchronizeEvent");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    waited("synchronizeDevice");
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random numbers: those of a CPU generator that belongs to the device -------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(at::Generator from)
      : c10::GeneratorImpl({kDevice, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(from)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(inner.clone());
  }
};

at::Generator new_generator() {
  return at::make_generator<Generator>(at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom()));
}

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>(at::make_generator<at::CPUGeneratorImpl>());
  return generator;
}

void refuse(c10::DeviceIndex index) {
  TORCH_CHECK(index == 0, "invalid device ordinal ", static_cast<int>(index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    refuse(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    refuse(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kDevice, 0};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// Kernels of the device's own -----------------------------------------------------------------------------------------------

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU. An empty one is fresh, so that a kernel may resize it.
Tensor as_cpu(const Tensor& t) {
  const auto options = t.options().device(c10::kCPU);
  if (t.device().type() == c10::kCPU)
    return t;
  if (t.numel() == 0)
    return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}

// A new tensor of the device with the values of a new tensor of the CPU.
Tensor as_device(const Tensor& t) {
  Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice));
  as_cpu(made).copy_(t);
  return made;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device().type() == c10::kCPU && to.device().type() == kDevice) {
    to_device++;
    to_device_bytes += static_cast<int64_t>(from.nbytes());
    if (!non_blocking)
      waited("copy to the device"); // CUDA synchronizes the stream after a blocking copy
  } else if (to.device().type() == c10::kCPU && from.device().type() == kDevice) {
    to_host++;
    to_host_bytes += static_cast<int64_t>(from.nbytes());
    if (!non_blocking)
      waited("copy to the host");
  }
  if (from.numel() != 0)
    as_cpu(to).copy_(as_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& t) {
  waited("item");
  return at::native::_local_scalar_dense_cpu(as_cpu(t));
}

Tensor& set_source(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(t, std::move(storage), offset, size, stride);
  t.unsafeGetTensorImpl()->set_storage_offset(offset);
  const auto strides = stride.data() != nullptr ? at::OptionalIntArrayRef(stride) : std::nullopt;
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size, strides);
  return t;
}

Tensor& set_storage(Tensor& t, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / t.dtype().itemsize());
  return set_source(t, std::move(storage), 0, count, {});
}

Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_source(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Everything else: the CPU's kernel on the same memory ----------------------------------------------------------------------

bool waits_for_values(const std::string& name, const torch::jit::Stack& stack, size_t begin) {
  static const std::set<std::string> reads = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::argwhere", "aten::is_nonzero"};
  if (reads.count(name))
    return true;
  if (name == "aten::repeat_interleave")
    return stack.back().isNone(); // the size of the output follows from the values, unless it is given
  if (name == "aten::_index_put_impl_" || name == "aten::index_put_") { // aten::index calls nonzero itself
    for (const auto& index : stack[begin + 1].toList()) {
      const IValue value = index;
      if (value.isTensor() && (value.toTensor().scalar_type() == at::kBool || value.toTensor().scalar_type() == at::kByte))
        return true;
    }
  }
  return false;
}

struct Written {
  Tensor device, cpu;
};

// Arguments of one call, as the CPU's kernel takes them.
struct Arguments {
  const c10::OperatorHandle& op;
  std::vector<Written> written, passed;
  std::vector<Tensor> host;
  bool any = false;

  Tensor tensor(const Tensor& t, bool write) {
    if (!t.defined())
      return t;
    if (t.device().type() != kDevice) {
      if (t.dim() > 0 || write)
        host.push_back(t);
      return t;
    }
    any = true;
    Tensor cpu = as_cpu(t);
    if (write)
      written.push_back({t, cpu});
    passed.push_back({t, cpu});
    return cpu;
  }

  // An index may be on the CPU, as on a GPU: it is copied, and the host waits for that.
  Tensor index(const Tensor& t) {
    if (t.defined() && t.device().type() == c10::kCPU) {
      to_device++;
      to_device_bytes += static_cast<int64_t>(t.nbytes());
      waited("copy of an index to the device");
      return t;
    }
    return tensor(t, false);
  }

  void replace(IValue& value, bool write, const c10::Type& type) {
    if (value.isTensor()) {
      value = tensor(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector())
        list.push_back(tensor(t, write));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& each : value.toListRef())
        list.push_back(each.isTensor() ? std::optional<Tensor>(index(each.toTensor())) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      const auto given = value.toGenerator();
      TORCH_CHECK(given.device().type() == kDevice, op.schema().name(), ": expected a generator of the device, got one of the CPU");
      value = given.get<Generator>()->inner;
    } else if (value.isNone() && type.str().find("Generator") != std::string::npos) {
      value = default_generator().get<Generator>()->inner;
    }
  }

  // The result as the device's: the argument that it is, or a new tensor.
  Tensor result(const Tensor& t) const {
    if (!t.defined() || t.device().type() != c10::kCPU)
      return t;
    for (const auto& each : passed)
      if (each.cpu.is_same(t))
        return each.device;
    return as_device(t);
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  for (const auto& each : schema.returns())
    TORCH_CHECK(each.alias_info() == nullptr || each.alias_info()->isWrite(), schema.name(), " makes a view: register it");
  if (waits_for_values(schema.name(), *stack, begin))
    waited(schema.name());
  Arguments arguments{op};
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    arguments.replace((*stack)[begin + i], write, *argument.real_type());
  }
  TORCH_CHECK(
      !arguments.any || arguments.host.empty(),
      schema.name(), ": expected all tensors to be on the same device, but a tensor of shape ",
      arguments.host.empty() ? c10::IntArrayRef() : arguments.host[0].sizes(), " is on the CPU");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto& each : arguments.written) {
    const bool moved = each.device.numel() == 0 ? each.cpu.numel() != 0 : each.cpu.data_ptr() != each.device.data_ptr();
    if (moved || each.cpu.sizes() != each.device.sizes()) {
      each.device.resize_(each.cpu.sizes());
      as_cpu(each.device).copy_(each.cpu);
    }
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = arguments.result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector())
        list.push_back(arguments.result(t));
      value = std::move(list);
    }
  }
}

// Fused attention: the CPU's flash kernel, under the name by which torch calls a kernel of another device --------------------

int64_t sdp_choice(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  TORCH_CHECK(!mask.has_value() || mask->device() == q.device(), "the mask of attention is on another device");
  const auto bias = mask.has_value() ? std::optional<Tensor>(as_cpu(*mask).requires_grad_(mask->requires_grad())) : std::nullopt;
  const auto on_cpu = [](const Tensor& t) { return as_cpu(t).requires_grad_(t.requires_grad()); };
  const auto choice = at::_fused_sdp_choice(on_cpu(q), on_cpu(k), on_cpu(v), bias, dropout, causal, scale, grouped);
  return choice == static_cast<int64_t>(at::SDPBackend::flash_attention) ? static_cast<int64_t>(at::SDPBackend::overrideable)
                                                                         : choice;
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
} // namespace at::native

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> fused_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool causal, bool,
    std::optional<double> scale) {
  const auto bias = mask.has_value() ? std::optional<Tensor>(as_cpu(*mask)) : std::nullopt;
  auto [out, log] =
      at::_scaled_dot_product_flash_attention_for_cpu(as_cpu(q), as_cpu(k), as_cpu(v), dropout, causal, bias, scale);
  return {as_device(out), as_device(log), Tensor(), Tensor(), q.size(2), k.size(2), Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, std::array<bool, 4>,
    const Tensor& out, const Tensor& log, const Tensor&, const Tensor&, int64_t, int64_t, double dropout, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  const auto bias = mask.defined() ? std::optional<Tensor>(as_cpu(mask)) : std::nullopt;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(grad), as_cpu(q), as_cpu(k), as_cpu(v), as_cpu(out), as_cpu(log), dropout, causal, bias, scale);
  return {as_device(dq), as_device(dk), as_device(dv), Tensor()};
}

// Convolutions: torch asks for kernels under these names ---------------------------------------------------------------------

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  const auto added = bias.has_value() && bias->defined() ? std::optional<Tensor>(as_cpu(*bias)) : std::nullopt;
  return as_device(at::convolution(
      as_cpu(input), as_cpu(weight), added, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> needed) {
  const std::vector<int64_t> bias_size{grad.size(1)};
  auto [dx, dw, db] = at::convolution_backward(
      as_cpu(grad), as_cpu(input), as_cpu(weight), c10::IntArrayRef(bias_size), stride, padding, dilation, transposed,
      output_padding, groups, needed);
  const auto moved = [](const Tensor& t) { return t.defined() ? as_device(t) : t; };
  return {moved(dx), moved(dw), moved(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &fused_attention_backward);
}

// Operations of which the CPU has a kernel besides a composite one, which would run in its place: they go to the CPU's too.
void take_over(const std::vector<std::string>& names) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : names)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("take_over", &take_over);
  m.def("default_generator", &default_generator);
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"current_bytes", current_bytes}, {"cached_bytes", cached_bytes}, {"peak_bytes", peak_bytes}, {"allocations", allocations}, {"waits", waits},
        {"to_device", to_device}, {"to_device_bytes", to_device_bytes}, {"to_host", to_host}, {"to_host_bytes", to_host_bytes}};
  });
  m.def("reset", [] {
    peak_bytes = current_bytes.load();
    for (auto* each : {&allocations, &waits, &to_device, &to_device_bytes, &to_host, &to_host_bytes})
      *each = 0;
  });
  m.def("on_wait", [](pybind11::object call) {
    Py_XDECREF(on_wait);
    on_wait = call.is_none() ? nullptr : call.release().ptr();
  });
}
