#include "check.h"
#include "uploads.h"

#include <atomic>
#include <future>
#include <string>

using namespace spo;

namespace {

// Keeps the only worker busy until the test has filled the queue.
struct gate {
    std::promise<void> open;
    std::promise<void> entered;

    upload closed() {
        return { 0, [this] {
                    entered.set_value();
                    open.get_future().wait();
                } };
    }
};

} // namespace

TEST(demand_goes_before_predicted_and_keeps_its_order) {
    std::string order;
    {
        gate               busy;
        std::promise<void> last;
        upload_queue       queue(1);
        queue.demand(busy.closed());
        busy.entered.get_future().wait();
        queue.predict({ 1, [&] { order += 'p'; } });
        queue.predict({ 2, [&] {
                           order += 'q';
                           last.set_value();
                       } });
        queue.demand({ 3, [&] { order += 'a'; } });
        queue.demand({ 4, [&] { order += 'b'; } });
        busy.open.set_value();
        last.get_future().wait();
    }
    CHECK(order == "abpq");
}

TEST(a_promoted_prediction_goes_behind_demand_and_before_other_predictions) {
    std::string order;
    {
        gate               busy;
        std::promise<void> last;
        upload_queue       queue(1);
        queue.demand(busy.closed());
        busy.entered.get_future().wait();
        queue.predict({ 1, [&] {
                           order += 'p';
                           last.set_value();
                       } });
        queue.predict({ 2, [&] { order += 'x'; } });
        queue.predict({ 2, [&] { order += 'y'; } });
        queue.demand({ 3, [&] { order += 'a'; } });
        queue.promote(2);
        busy.open.set_value();
        last.get_future().wait();
    }
    CHECK(order == "axyp");
}

TEST(a_dropped_prediction_does_not_run) {
    bool ran = false;
    {
        gate         busy;
        upload_queue queue(1);
        queue.demand(busy.closed());
        busy.entered.get_future().wait();
        queue.predict({ 1, [&] { ran = true; } });
        queue.predict({ 1, [&] { ran = true; } });
        queue.predict({ 2, [] {} });
        CHECK(!queue.drop(1, 3)); // one of three has started
        CHECK(queue.drop(1, 2));
        CHECK(!queue.drop(1, 2));
        busy.open.set_value();
    }
    CHECK(!ran);
}

TEST(a_caller_can_help_with_demand_but_not_with_predictions) {
    gate         busy;
    bool         ran = false;
    upload_queue queue(1);
    queue.demand(busy.closed());
    busy.entered.get_future().wait();
    queue.predict({ 1, [] {} });
    CHECK(!queue.help());
    queue.demand({ 2, [&] { ran = true; } });
    CHECK(queue.help() && ran);
    busy.open.set_value();
}

TEST(destruction_drops_what_is_queued_and_joins) {
    std::atomic<int> ran{ 0 };
    for (int i = 0; i < 20; ++i) {
        upload_queue queue(3);
        for (int n = 0; n < 40; ++n) {
            queue.demand({ 1, [&] { ran += 1; } });
            queue.predict({ 2, [&] { ran += 1; } });
        }
    }
    CHECK(ran <= 20 * 80);
}
