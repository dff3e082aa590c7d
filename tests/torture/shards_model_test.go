package torture

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Random calls of a client.Sharded, one after the other, get what the model of a single database answers.
func TestTorture_ShardsModel(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 600)
	s := kit.NewShards(t)
	s.Each(func(db *kit.TestDB) { db.SetTimeZone("Europe/Berlin") })
	c := &shardsCaller{s, s.Limiter(nil), newDrawn(rand.New(rand.NewPCG(kit.TestSeed(t), 0)))}
	c.kinds, c.keys = []string{"bucket"}, nil
	for shard := range s.Of() {
		c.keys = append(c.keys, s.Key(shard, "x"), s.Key(shard, "y"))
	}
	c.setTime(kit.T0)
	met := map[string]int{}
	for _, name := range c.policies {
		for known := false; !known; _, known = c.Policy(name) {
			c.send(t, met, "define_policy", c.definition(name))
		}
	}
	for run.GoesOn() {
		if c.oneIn(6) {
			at := c.span().After(c.now)
			if len(c.instants) > 0 && c.oneIn(2) {
				at = model.Micros(c.IntN(3) - 1).After(oneOf(c.fuzzed, c.instants))
			}
			c.setTime(at)
			continue
		}
		function := oneOf(c.fuzzed, shardedFunctions)
		if strings.Contains("drop_policy define_policy", function) && !c.oneIn(4) {
			continue
		}
		args := c.good(function)
		if function == "acquire_all" && c.oneIn(2) { // of one shard
			for _, key := range args[1].([]*string) {
				*key = s.Key(client.ShardOf(*args[1].([]*string)[0], s.Of()), (*key)[:1])
			}
		}
		c.send(t, met, function, args)
		run.Progress("%v", met)
	}
	for _, function := range shardedFunctions {
		require.NotZero(t, met[function], function)
	}
	require.NotZero(t, met["of several shards"])
	run.Counts(met)
}

// A shardsCaller makes every call twice, to a client.Sharded and to the model.
type shardsCaller struct {
	*kit.Shards
	limiter *client.Sharded
	*drawn
}

// setTime stays within what RFC 3339 can say, with the longest override.
func (c *shardsCaller) setTime(now time.Time) {
	if now.Year() < 1000 || now.Year() > 8000 {
		now = kit.T0
	}
	c.now = now
	c.Each(func(db *kit.TestDB) { db.SetClock(now) })
}

var shardedFunctions = []string{
	"acquire", "acquire", "acquire_all", "acquire_all", "peek", "refund", "reserve", "charge", "settle", "acquire_up_to",
	"reset", "define_policy", "drop_policy", "policies", "override", "remove_override", "overrides", "cleanup",
}

func (c *shardsCaller) send(t *testing.T, met map[string]int, function string, args []any) {
	const longest = math.MaxInt64 / 1000
	for i := range args { // what a time.Duration can hold
		if s, ok := args[i].(kit.Span); ok && function != "reserve" {
			args[i] = kit.SpanOf(min(s.Micros(), longest))
		}
	}
	name := fmt.Sprintf("%s %v", function, args)
	var told []kit.Decision
	var err error
	if function == "acquire_all" {
		var apart bool
		if told, apart, err = c.acquireAll(args); apart {
			require.ErrorIs(t, err, client.ErrSeveralShards)
			met["of several shards"]++
			return
		}
	} else {
		told, err = c.call(function, args)
	}
	model := &kit.Call{Function: function, Args: args, Model: c.Model, Now: c.now}
	_, want := model.Answer()
	code, _ := kit.Refusal(want)
	require.Equal(t, code, kit.SQLState(err), "%s: %v", name, err)
	require.Equal(t, code == "", err == nil, "%s: %v", name, err)
	if met[function]++; err != nil {
		return
	}
	for i := range told {
		require.Equal(t, asDurations(model.Told[i]), told[i], name)
	}
	c.saw(function, model.Told)
	if function == "cleanup" {
		c.compareLeft(t)
	}
}

// asDurations is a decision with the longest times that the client can tell.
func asDurations(d kit.Decision) kit.Decision {
	for _, at := range []*model.Micros{&d.RetryAfter, &d.ResetAfter} {
		if *at != model.Never {
			*at = min(*at, math.MaxInt64/1000)
		}
	}
	return d
}

func (c *shardsCaller) acquireAll(args []any) (told []kit.Decision, apart bool, err error) {
	call := kit.Call{Function: "acquire_all", Args: args}
	r := call.Whole()
	for _, of := range r.Charges {
		apart = apart || client.ShardOf(of.Key, c.Of()) != client.ShardOf(r.Charges[0].Key, c.Of())
	}
	w, err := r.By(context.Background(), c.limiter)
	return append([]kit.Decision{w.Decision}, w.Decisions...), apart, err
}

func (c *shardsCaller) call(function string, args []any) (told []kit.Decision, err error) {
	ctx := context.Background()
	text := func(i int) string { s, _ := args[i].(string); return s }
	number := func(i int) int64 { n, _ := args[i].(int64); return n }
	// field is a number of a client.Policy or client.Override.
	field := func(i int) int64 {
		if args[i] == nil {
			return 0
		}
		return cmp.Or(number(i), client.Zero)
	}
	length := func(i int) time.Duration {
		if s, ok := args[i].(kit.Span); ok {
			return time.Duration(s.Micros()) * kit.Us
		}
		return 0
	}
	choice := func(i int) client.Choice {
		if b, ok := args[i].(bool); ok {
			return kit.ChoiceOf(&b)
		}
		return client.Keep
	}
	var d client.Decision
	spending := func(cost, atLeast int64, maxWait time.Duration, idempotencyKey int) ([]kit.Decision, error) {
		s, err := kit.Spending{
			Function: function, BucketID: model.BucketID{Policy: text(0), Key: text(1)}, Cost: cost, AtLeast: atLeast,
			MaxWait: kit.Micros(maxWait), IdempotencyKey: text(idempotencyKey),
		}.With(ctx, c.limiter)
		return []kit.Decision{s.Decision}, err
	}
	switch function {
	case "acquire":
		d, err = kit.Request{BucketID: model.BucketID{Policy: text(0), Key: text(1)}, Cost: number(2), IdempotencyKey: text(3)}.By(ctx, c.limiter)
	case "peek":
		d, err = c.limiter.Peek(ctx, text(0), text(1), client.Cost(number(2)))
	case "refund":
		d, err = c.limiter.Refund(ctx, text(0), text(1), number(2))
	case "charge":
		return spending(number(2), 0, 0, 3)
	case "settle":
		return spending(number(3), 0, 0, 2)
	case "reserve":
		return spending(number(3), 0, length(2), 4)
	case "acquire_up_to":
		return spending(number(2), number(3), 0, 4)
	case "reset":
		return nil, c.limiter.Reset(ctx, text(0), text(1))
	case "define_policy":
		return nil, c.limiter.DefinePolicy(ctx, client.Policy{
			Name: text(0), Capacity: field(1), Refill: field(2), Every: length(3), Stepped: choice(4), Durable: choice(5), Remember: length(6), Shadow: choice(7),
		})
	case "drop_policy":
		return nil, c.limiter.DropPolicy(ctx, text(0))
	case "override":
		o := client.Override{Policy: text(0), Key: text(1), Capacity: field(2), Refill: field(3), Every: length(4)}
		if at, ok := args[5].(kit.Instant); ok {
			o.ExpiresAt = time.UnixMicro(int64(at))
		}
		return nil, c.limiter.Override(ctx, o)
	case "remove_override":
		had, err := c.limiter.RemoveOverride(ctx, text(0), text(1))
		return []kit.Decision{{Allowed: had}}, err
	case "policies":
		all, err := c.limiter.Policies(ctx)
		return nil, cmp.Or(err, sameNumber(len(c.Policies()), len(all)))
	case "overrides":
		args[0], args[1], args[2] = nil, nil, int64(math.MaxInt32)
		live := 0
		for _, o := range c.Overrides() {
			if o.Live(c.now) {
				live++
			}
		}
		all, err := c.limiter.Overrides(ctx)
		return nil, cmp.Or(err, sameNumber(live, len(all)))
	case "cleanup":
		return nil, kit.ErrorOf(c.limiter.Cleanup(ctx))
	}
	return []kit.Decision{kit.DecisionOf(d)}, err
}

func sameNumber(want, got int) error {
	if want != got {
		return fmt.Errorf("%d instead of %d", got, want)
	}
	return nil
}

// compareLeft takes the buckets without a row from the model.
func (c *shardsCaller) compareLeft(t *testing.T) {
	c.CleanUp(c.now)
	left := map[string]bool{}
	c.Each(func(db *kit.TestDB) {
		for _, id := range kit.Column(t, db.DB, "select l.coalesce || ' ' || l.key from ("+leftQuery+") as l") {
			left[id] = true
		}
	})
	for _, id := range c.Buckets() {
		if name := id.Policy + " " + id.Key; !left[name] {
			require.True(t, c.Remove(c.now, id), "clean-up removed %v, which was not full", id)
		} else {
			delete(left, name)
		}
	}
	require.Empty(t, left, "buckets that should have no row")
}
