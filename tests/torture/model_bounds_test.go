package torture

import (
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	aSecond model.Micros = 1_000_000
	aMinute              = 60 * aSecond
)

func bucketOf(policy string) model.BucketID { return model.BucketID{Policy: policy, Key: "k"} }

// refilling is the numbers of a policy that gains so many tokens each second.
func refilling(capacity, refill int64) model.Numbers {
	return model.Numbers{Capacity: &capacity, Refill: &refill, Every: new(aSecond)}
}

// refused requires that both refuse the arguments of a call.
func (m *modelRun) refused(t *rapid.T, call func(), about ...any) {
	before := m.met["22023"]
	call()
	require.Equal(t, before+1, m.met["22023"], about...)
}

// meetBounds has definitions, overrides and requests that are just wrong, and what else random calls do not come to.
func (m *modelRun) meetBounds(t *rapid.T) {
	one, daily := new(int64(1)), model.Period{Days: 1}
	quota := func(period model.Period, n model.Numbers) model.Definition {
		n.Capacity = one
		return model.Definition{Period: &period, Numbers: n}
	}
	lending := func(n model.Numbers) model.Definition {
		n.Capacity, n.Lease = one, new(aMinute)
		return model.Definition{Numbers: n}
	}
	slots := func(capacity int64, lease model.Micros) model.Definition {
		return model.Definition{Numbers: model.Numbers{Capacity: &capacity, Lease: &lease}}
	}
	charge := func(policy string, cost int64) model.Charge { return kit.ChargeOf(policy, "k", cost) }
	ask := func(idempotencyKey string, charges ...model.Charge) {
		m.sendOne(t, kit.WholeRequest{Charges: charges, IdempotencyKey: idempotencyKey})
	}
	year10000 := new(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC))
	others := []model.Numbers{{Refill: one}, {Every: new(aSecond)}, {Zone: new("UTC")}, {Anchor: &kit.T0}, {Lease: new(aMinute)}}
	wrongDefinitions := []model.Definition{
		{Numbers: model.Numbers{Capacity: one}}, // no refill
		{Period: &daily},                        // no capacity
		quota(daily, model.Numbers{Refill: one}), quota(daily, model.Numbers{Every: new(aSecond)}),
		quota(model.Period{}, model.Numbers{}), quota(model.Period{Months: 1, Days: 1}, model.Numbers{}), quota(model.Period{Days: -1}, model.Numbers{}),
		quota(model.Period{Months: 12_001}, model.Numbers{}), quota(model.Period{Days: 365_251}, model.Numbers{}), // more than 1000 years
		quota(daily, model.Numbers{Zone: new("CET")}), quota(daily, model.Numbers{Zone: new("Europe/Atlantis")}),
		quota(daily, model.Numbers{Zone: new("Europe/./Berlin")}), quota(daily, model.Numbers{Zone: new("right/Europe/Berlin")}),
		quota(daily, model.Numbers{Anchor: year10000}),
		{Period: &daily, Numbers: model.Numbers{Capacity: one}, Stepped: new(false)},
		{Numbers: model.Numbers{Capacity: one, Refill: one, Every: new(aSecond), Zone: new("UTC")}},
		{Numbers: model.Numbers{Capacity: one, Refill: one, Every: new(aSecond), Anchor: &kit.T0}},

		{Numbers: model.Numbers{Lease: new(aMinute)}},
		slots(0, aMinute), slots(10_001, aMinute), slots(1, 0), slots(1, 999), slots(1, 365_250*24*60*aMinute+1),
		lending(others[0]), lending(others[1]), lending(others[2]), lending(others[3]),
		{Numbers: model.Numbers{Capacity: one, Lease: new(aMinute)}, Period: &daily},
		{Numbers: model.Numbers{Capacity: one, Lease: new(aMinute)}, Stepped: new(false)},
		{Numbers: model.Numbers{Capacity: one, Lease: new(aMinute)}, Remember: new(aSecond)},
	}
	for _, def := range wrongDefinitions {
		m.refused(t, func() { m.defineAs(t, "new", def) }, def)
	}
	m.defineAs(t, "most", slots(10_000, 365_250*24*60*aMinute))
	m.defineAs(t, "least", slots(1, 1000))

	for name, def := range map[string]model.Definition{
		"user": {Numbers: refilling(10, 1)}, "org": {Numbers: refilling(20, 2)}, "quota": quota(daily, model.Numbers{}), "jobs": slots(3, 5*aMinute),
	} {
		m.defineAs(t, name, def)
	}
	for name, wrong := range map[string][]model.Numbers{
		"user": others[2:], "jobs": others[:4], "quota": {{Refill: new(int64)}, {Every: new(aSecond)}, {Lease: new(aMinute)}},
	} {
		for _, n := range wrong {
			m.refused(t, func() { m.defineAs(t, name, model.Definition{Numbers: n}) }, name, n)
			m.refused(t, func() { m.setOverride(t, bucketOf(name), n, time.Time{}) }, name, n)
		}
	}
	for name, def := range map[string]model.Definition{
		"user": {Period: &daily}, "jobs": {Period: &daily}, "org": {Durable: new(false)}, "least": {Durable: new(false)},
	} {
		m.refused(t, func() { m.defineAs(t, name, def) }, name, def)
	}
	m.defineAs(t, "jobs", model.Definition{Durable: new(true), Shadow: new(false)})
	for _, n := range []model.Numbers{{Lease: new(model.Micros(999))}, {Capacity: new(int64(10_001))}, {Capacity: new(int64(-1))}} {
		m.refused(t, func() { m.setOverride(t, bucketOf("jobs"), n, time.Time{}) }, n)
	}
	m.setOverride(t, bucketOf("none"), model.Numbers{Lease: new(aMinute)}, time.Time{})
	m.setOverride(t, bucketOf("none"), model.Numbers{}, time.Time{})
	m.refused(t, func() { m.setOverride(t, bucketOf("none"), refilling(-1, 1), time.Time{}) }) // which comes before
	m.refused(t, func() { m.setOverride(t, bucketOf("user"), model.Numbers{}, m.now) })

	for _, cost := range []int64{0, -1, math.MinInt64} {
		m.refused(t, func() { m.sendHold(t, bucketOf("jobs"), "a", cost) }, cost)
	}
	for _, policy := range []string{"user", "none"} {
		m.sendHold(t, bucketOf(policy), "a", 1)
		m.sendRenew(t, bucketOf(policy), "a")
		m.sendRelease(t, bucketOf(policy), "a")
	}
	ask("", charge("jobs", 1))
	ask("", charge("user", 1), charge("jobs", 0))
	ask("", charge("none", 1), charge("jobs", 1))
	ask("i") // no charges
	m.sendRefund(t, bucketOf("jobs"), 1)
	for _, function := range []string{"charge", "settle", "reserve", "acquire_up_to"} {
		m.sendSpending(t, kit.Spending{Function: function, BucketID: bucketOf("jobs"), Cost: 1, AtLeast: 1, IdempotencyKey: "i"})
	}
	m.sendPeek(t, bucketOf("user"), 0) // from which nothing was taken

	// The sum of these costs is beyond a bigint. Of two errors of a request, that of the cost comes first.
	ask("", charge("user", math.MaxInt64), charge("user", math.MaxInt64))
	ask("i", charge("user", 1))
	m.sendSpending(t, kit.Spending{Function: "settle", BucketID: bucketOf("user"), Cost: 1, IdempotencyKey: "i"})
	ask("i", charge("org", 2))
	ask("i", charge("user", 1), charge("org", 1))

	// A zone of its own ends with an override: the next one is in the policy's.
	expires := m.now.Add(time.Minute)
	m.setOverride(t, bucketOf("quota"), model.Numbers{Zone: new("Pacific/Auckland")}, expires)
	m.setOverride(t, bucketOf("org"), model.Numbers{}, expires)
	m.setClock(t, expires)
	m.removeOverride(t, bucketOf("org")) // which has ended
	m.setOverride(t, bucketOf("quota"), model.Numbers{}, time.Time{})
	m.listOverrides(t, bucketOf("quota"))
	m.met["bounds"]++
}

// Each turn is where PostgreSQL has it, to the microsecond, and is the next one until then.
func TestCalendar(t *testing.T) {
	t.Parallel()
	for _, c := range vectors.Turns {
		calendar := model.Calendar{Period: model.Period(c.Period), Zone: c.Zone, Anchor: c.Anchor}
		name := fmt.Sprintf("%+v", c)
		require.Equal(t, c.At, calendar.Turn(c.N).UTC(), name)
		require.Equal(t, c.At, calendar.Next(c.At.Add(-time.Microsecond)), name)
		require.True(t, calendar.Next(c.At).After(c.At), name)
		require.Contains(t, []time.Time{calendar.Turn(c.N + 1).UTC(), calendar.Turn(c.N + 2).UTC()}, calendar.Next(c.At), name)
	}
}

// Clean-up of the database may leave a row that it could remove, so a comparison does not find a model that would remove too much.
// A bucket that is full by the policy's numbers alone, or by its override's alone, must stay, and so must one that refills nothing. An
// override counts for as long as it had not expired when clean-up judges.
func TestCleanUp_LooksAtOverrides(t *testing.T) {
	t.Parallel()
	began, expires, user := kit.T0, kit.T0.Add(time.Hour), bucketOf("user")
	for _, c := range []struct {
		level, capacity int64
		at              time.Time
		full            bool
	}{
		{10, 10, began, true},
		{10, 20, began, false},
		{5, 5, began, false},
		{20, 20, began, true},
		{10, 20, expires.Add(model.CleanUpMargin).Add(-time.Microsecond), false},
		{10, 20, expires.Add(model.CleanUpMargin), true},
		{9, 9, began.AddDate(5000, 0, 0), false},
	} {
		m := model.New()
		require.NoError(t, m.Define("user", model.Definition{Numbers: refilling(10, 0)}))
		require.NoError(t, m.Override(began, user, model.Numbers{Capacity: &c.capacity}, expires))
		m.Put(user, model.Bucket{Level: big.NewInt(c.level * 1_000_000), RefilledAt: began})
		m.CleanUp(c.at)
		require.Equal(t, c.full, m.Remove(c.at, user), c)
	}
}
