#include "engine.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <utility>

namespace spo {

namespace {

constexpr size_t lane_bytes = size_t(4) << 20;

std::vector<std::string> paths_of(const spo_params & params) { return { params.files, params.files + params.n_files }; }

// A third of what one token leaves over, and one slot whenever there is one.
int probation_of(int n_slots, int n_used) { return std::max(n_slots > n_used ? 1 : 0, (n_slots - n_used) / 3); }

} // namespace

engine::engine(const spo_params & params) :
    n_parallel_(params.n_parallel),
    forget_(params.forget != 0),
    misses_(miss_mode(params.misses)),
    source_(paths_of(params), params.source),
    link_(params.link_rate, params.link_latency) {
    read_layout(params);
    open_devices(params);
    make_pools(params);
    queue_ = std::make_unique<upload_queue>(params.n_workers);
}

void engine::read_layout(const spo_params & params) {
    if (params.n_matrices < 1 || params.n_pools < 1 || params.n_workers < 1 || params.n_used < 1 ||
        params.n_staging < 1 || params.half_life < 1 || params.n_parallel < 1 || params.misses < SPO_MISSES_UPLOAD ||
        params.misses > SPO_MISSES_AUTO) {
        throw std::invalid_argument("an engine needs matrices, pools, workers, staging, positive counts, a known way "
                                    "with misses");
    }
    matrices_.reserve(params.n_matrices); // graphs keep pointers into both
    layers_.reserve(params.n_matrices);
    std::vector<int> pool_layers(params.n_pools, 0);
    for (int i = 0; i < params.n_matrices; ++i) {
        const spo_matrix & m = params.matrices[i];
        const matrix_shape shape{ ggml_type(m.type), m.ne0, m.ne1 };
        if (m.type < 0 || m.type >= GGML_TYPE_COUNT || m.ne0 < 1 || m.ne1 < 1 || m.n_expert < 1 || m.pool < 0 ||
            m.pool >= params.n_pools || m.file < 0 || m.file >= params.n_files || m.slot_file < 0 ||
            m.slot_file >= params.n_files || shape.bytes() != m.expert_bytes || m.slot_stride < m.expert_bytes) {
            throw std::invalid_argument(std::string(m.name) + ": type, shape, pool, file or size do not fit together");
        }
        if (layers_.empty() || layers_.back().block != m.layer) {
            by_block_[m.layer] = int(layers_.size());
            layers_.push_back(
                { this, m.layer, m.pool, pool_layers[m.pool]++, i, 0, m.n_expert, 0, m.packed != 0, m.shared != 0 });
        }
        moe_layer & layer = layers_.back();
        if (layer.pool != m.pool || layer.n_expert != m.n_expert) {
            throw std::invalid_argument(std::string(m.name) + ": differs in pool or experts from its layer");
        }
        by_name_[m.name] = i;
        matrices_.push_back({ this, m.name, i, int(layers_.size()) - 1, layer.n_matrices, shape, m.n_expert, m.file,
                              m.offset, m.slot_file, m.slot_offset, m.slot_stride });
        bufts_.push_back(cpu_expert_buft(shape, m.n_expert, params.n_used, params.repack != 0));
        repacked_ += !ggml_backend_buft_is_host(bufts_.back());
        layer.n_matrices += 1;
        layer.expert_bytes += m.expert_bytes;
        staged_.emplace_back(m.n_expert, uint8_t(0));
    }
}

// Banks of a device lie in its memory as they lie in the file; each thread that copies has a lane to each.
void engine::open_devices(const spo_params & params) {
    size_t largest = 0;
    for (const matrix & m : matrices_) {
        largest = std::max(largest, m.shape.bytes());
    }
    std::map<std::string, device *> opened;
    for (int p = 0; p < params.n_pools; ++p) {
        const char * name = params.pool_devices ? params.pool_devices[p] : params.device;
        if (name && opened.count(name) == 0) {
            devices_.push_back(std::make_unique<device>(name, params.n_workers + 1, std::max(largest, lane_bytes)));
            opened[name] = devices_.back().get();
        }
        device_of_.push_back(name ? opened[name] : nullptr);
    }
    if (devices_.empty()) {
        return;
    }
    repacked_       = 0;
    stats_.pinned   = 1;
    stats_.overlaps = 1;
    for (const auto & d : devices_) {
        stats_.pinned &= int32_t(d->pinned());
        stats_.overlaps &= int32_t(d->async());
    }
    for (size_t m = 0; m < matrices_.size(); ++m) {
        const device * d = device_of_[layers_[matrices_[m].layer].pool];
        if (!d) {
            throw std::invalid_argument("some pools lie on devices and others in main memory");
        }
        bufts_[m] = d->buft();
    }
    pin(params.pin_bytes);
}

void engine::pin(uint64_t most) {
    const ggml_backend_buffer_type_t buft = devices_.front()->host_buft();
    if (most == 0 || !buft) {
        return;
    }
    std::vector<pinned_experts::range> all;
    for (const matrix & m : matrices_) {
        all.push_back({ m.file, m.offset, m.shape.bytes() * size_t(m.n_expert) });
    }
    pinned_             = std::make_unique<pinned_experts>(buft, source_, all, size_t(most));
    stats_.pinned_bytes = pinned_->bytes();
}

ggml_tensor * engine::in_memory(const matrix & m, ggml_tensor * mapped) {
    ggml_tensor * found = pinned_ ? pinned_->tensor(m.file, m.offset, m.shape, m.n_expert) : nullptr;
    return found ? found : mapped;
}

void engine::make_pools(const spo_params & params) {
    for (int p = 0; p < params.n_pools; ++p) {
        std::vector<const moe_layer *> members;
        for (const moe_layer & layer : layers_) {
            if (layer.pool == p) {
                members.push_back(&layer);
            }
        }
        const int n_slots = params.pools[p];
        if (members.empty() || n_slots < 1) {
            throw std::invalid_argument("pool " + std::to_string(p) + " has no layers or no slots");
        }
        const moe_layer & model = *members.front();
        for (const moe_layer * layer : members) {
            bool same = layer->n_matrices == model.n_matrices && layer->n_expert == model.n_expert;
            for (int i = 0; same && i < model.n_matrices; ++i) {
                same = matrices_[layer->first + i].shape == matrices_[model.first + i].shape;
            }
            if (!same) {
                throw std::invalid_argument("pool " + std::to_string(p) + " joins layers of different shapes");
            }
        }
        const int n_layers = int(members.size());
        slot_pool pool{
            slot_table(n_slots, probation_of(n_slots, params.n_used), n_layers, model.n_expert,
                       make_policy(params.policy, n_layers, model.n_expert, params.half_life)),
            {},
            {},
            std::vector<slot_pool::transfer>(n_slots),
        };
        for (int i = 0; i < model.n_matrices; ++i) {
            const matrix_shape & shape = matrices_[model.first + i].shape;
            const auto           buft  = bufts_[model.first + i];
            const size_t         bytes = bank::bytes_for(shape, n_slots + 1, buft);
            pool.memory.emplace_back(ggml_backend_buft_alloc_buffer(buft, bytes));
            if (!pool.memory.back()) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(pool.memory.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            if (shares_misses()) { // the spare slot stands for what is computed elsewhere, and must add nothing
                ggml_backend_buffer_clear(pool.memory.back().get(), 0);
            }
            pool.banks.emplace_back(shape, n_slots + 1, pool.memory.back().get(), 0);
            stats_.bank_bytes += bytes;
        }
        pools_.push_back(std::move(pool));
    }
    std::vector<matrix_shape> shapes;
    std::vector<int>          experts;
    for (const matrix & m : matrices_) {
        shapes.push_back(m.shape);
        experts.push_back(m.n_expert);
    }
    staging_             = std::make_unique<staging>(shapes, experts, bufts_, params.n_staging);
    stats_.staging_bytes = staging_->bytes();
    predictions_.resize(layers_.size());
}

const matrix * engine::find(const char * tensor_name) const {
    const auto found = by_name_.find(tensor_name);
    return found == by_name_.end() ? nullptr : &matrices_[found->second];
}

const moe_layer * engine::find_layer(int block) const {
    const auto found = by_block_.find(block);
    return found == by_block_.end() ? nullptr : &layers_[found->second];
}

int engine::start_upload(int layer_index, int expert, bool predicted, bool urgent) {
    const moe_layer & layer = layers_[layer_index];
    slot_pool &       pool  = pools_[layer.pool];
    slot              evicted;
    const auto        claimed = pool.table.claim(layer.pool_layer, expert, predicted, &evicted);
    if (!claimed) {
        return -1;
    }
    if (evicted.predicted) {
        stats_.wasted_bytes += layer.expert_bytes;
    }
    enqueue(layer_index, expert, *claimed, urgent);
    return *claimed;
}

void engine::enqueue(int layer_index, int expert, int slot_index, bool urgent) {
    const moe_layer & layer                  = layers_[layer_index];
    const uint64_t    id                     = next_id_++;
    const int         n_copies               = layer.n_copies();
    const int         together               = layer.n_matrices / n_copies;
    pools_[layer.pool].transfers[slot_index] = { id, n_copies, false };
    in_flight_ += n_copies;
    for (int i = 0; i < n_copies; ++i) { // apart, so that threads can share one and demand can step between
        upload copy{ id, [this, &layer, i, together, expert, slot_index] {
                        fill_slot(matrices_[layer.first + i], together, expert, slot_index);
                    } };
        urgent ? queue_->demand(std::move(copy)) : queue_->predict(std::move(copy));
    }
}

bool engine::fill(const target * targets, int n, const matrix & m, int file, uint64_t offset, int expert) {
    if (should_abort()) {
        return false; // nobody waits for it any more
    }
    thread_local std::vector<uint8_t>            bounce;
    thread_local std::vector<file_source::piece> pieces;
    const auto                                   begin   = std::chrono::steady_clock::now();
    size_t                                       bytes   = 0;
    size_t                                       bounced = 0;
    for (int i = 0; i < n; ++i) {
        const size_t size = size_t(targets[i].count) * targets[i].to->expert_bytes();
        bytes += size;
        bounced += targets[i].to->plain(targets[i].i) ? 0 : size;
    }
    try {
        if (device * to_device = device_of_[layers_[m.layer].pool]) {
            uint64_t from = offset;
            for (int i = 0; i < n; ++i) { // experts of a bank lie side by side, as in the file
                const size_t expert_bytes = targets[i].to->expert_bytes();
                const size_t size         = size_t(targets[i].count) * expert_bytes;
                const size_t to           = size_t(targets[i].i) * expert_bytes;
                if (const uint8_t * ready = pinned_ ? pinned_->find(file, from, size) : nullptr) {
                    to_device->upload(targets[i].to->tensor(), to, size, ready);
                } else {
                    to_device->upload(targets[i].to->tensor(), to, size, [&](size_t at, size_t part, void * lane) {
                        source_.read(file, from + at, part, lane);
                    });
                }
                from += size;
            }
            link_.pass(begin, bytes);
            return true;
        }
        bounce.resize(std::max(bounce.size(), bounced));
        pieces.clear();
        bounced = 0;
        for (int i = 0; i < n; ++i) {
            const size_t size  = size_t(targets[i].count) * targets[i].to->expert_bytes();
            void *       plain = targets[i].to->plain(targets[i].i);
            pieces.push_back({ plain ? static_cast<uint8_t *>(plain) : bounce.data() + bounced, size });
            bounced += plain ? 0 : size;
        }
        source_.read(file, offset, pieces.data(), n);
        for (int i = 0; i < n; ++i) {
            if (!targets[i].to->plain(targets[i].i)) {
                targets[i].to->write(targets[i].i, targets[i].count, pieces[i].to);
            }
        }
    } catch (const std::exception & e) {
        fail_upload(m, expert, e);
        return false;
    }
    link_.pass(begin, bytes);
    return true;
}

void engine::fill_slot(const matrix & m, int n, int expert, int slot_index) {
    slot_pool &         pool  = pools_[layers_[m.layer].pool];
    const uint64_t      begin = now_ns();
    std::vector<target> targets;
    size_t              bytes = 0;
    for (int i = 0; i < n; ++i) {
        targets.push_back({ &pool.banks[m.position + i], slot_index, 1 });
        bytes += targets.back().to->expert_bytes();
    }
    const bool failed =
        !fill(targets.data(), n, m, m.slot_file, m.slot_offset + uint64_t(expert) * m.slot_stride, expert);
    {
        lock held(mutex_);
        trace_.span(pool.table.at(slot_index).predicted ? SPO_SPAN_PREDICTED : SPO_SPAN_DEMAND, begin,
                    layers_[m.layer].block, expert);
        copy_us_ += timing_step * (1e-3f * float(now_ns() - begin) - copy_us_);
        slot_pool::transfer & t = pool.transfers[slot_index];
        in_flight_ -= 1;
        t.failed |= failed;
        t.remaining -= 1;
        stats_.reads += on_device() ? n : 1;
        stats_.uploaded_bytes += failed ? 0 : bytes;
        if (t.remaining == 0 && t.failed) {
            pool.table.abandon(slot_index);
        } else if (t.remaining == 0) {
            pool.table.ready(slot_index);
            landed_ns_ = pool.table.at(slot_index).pins > 0 ? now_ns() : landed_ns_;
            stats_.uploads += 1;
        }
    }
    landed_.notify_all();
}

// The compute thread does not just sleep: it takes queued demand copies itself.
void engine::wait(lock & held, uint64_t & stall_ns, const std::function<bool()> & done) {
    if (should_abort() || done()) {
        return;
    }
    const uint64_t begin = now_ns();
    while (!should_abort() && !done()) {
        held.unlock();
        const bool helped = queue_->help();
        held.lock();
        if (!helped && !should_abort() && !done()) {
            landed_.wait(held);
        }
    }
    stall_ns += now_ns() - begin;
}

void engine::fail_upload(const matrix & m, int expert, const std::exception & e) {
    fail("layer " + std::to_string(layers_[m.layer].block) + ", expert " + std::to_string(expert) + ": " + e.what());
}

// --- callers

void engine::fail(const std::string & line) {
    {
        lock held(mutex_);
        if (error_.empty()) {
            error_ = line;
        }
        failed_ = true;
    }
    landed_.notify_all();
}

void engine::interrupt() {
    interrupted_ = true;
    landed_.notify_all();
}

std::string engine::reset() {
    lock held(mutex_);
    // A copy of the graph that ended must not fail the next one: let all finish, or refuse to start.
    interrupted_ = true;
    while (in_flight_ > 0) {
        held.unlock();
        const bool helped = queue_->help();
        held.lock();
        if (!helped && in_flight_ > 0) {
            landed_.wait(held);
        }
    }
    release(now_);
    release(ahead_);
    release(tail_);
    drop_adoption();
    interrupted_ = false;
    failed_      = false;
    return std::exchange(error_, "");
}

spo_stats engine::stats() {
    lock      held(mutex_);
    spo_stats out = stats_;
    out.source    = source_.kind();
    out.repacked  = repacked_;
    return out;
}

std::string engine::check() {
    lock held(mutex_);
    for (const slot_pool & pool : pools_) {
        const std::string broken = pool.table.check();
        if (!broken.empty()) {
            return broken;
        }
    }
    return "";
}

} // namespace spo
