package torture

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Random calls of a client.Sharded, one after the other, get what the model of a single database answers. What it has no method for is
// called in SQL, on the shard of the key.
func TestTorture_ShardsAgreeWithTheModel(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 600)
	s := kit.NewShards(t)
	s.Each(func(db *kit.TestDB) { db.SetTimeZone("Europe/Berlin") })
	c := &shardsCaller{s, s.Limiter(nil), newDrawn(rand.New(rand.NewPCG(kit.TestSeed(t), 0))), nil}
	s.Each(func(db *kit.TestDB) { c.wires = append(c.wires, db.Wire(t)) })
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
		function := oneOf(c.fuzzed, often)
		switch arguments := kit.Functions[function].List(); {
		case slices.Contains([]string{"acquire", "acquire_all", "define_policy", "drop_policy"}, function):
		case len(arguments) < 2 || arguments[1].Name != "key" || kit.Functions[function].Quiet && function != "override": // not of one key
			function = oneOf(c.fuzzed, []string{"acquire", "acquire_all"})
		}
		if function == "drop_policy" && !c.oneIn(4) {
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
	for _, what := range []string{"acquire", "acquire_all", "of several shards", "define_policy", "drop_policy"} {
		require.NotZero(t, met[what], what)
	}
	run.Counts(met)
}

// A shardsCaller makes every call twice, to a client.Sharded and to the model.
type shardsCaller struct {
	*kit.Shards
	limiter *client.Sharded
	*drawn
	wires []*kit.Wire
}

// setTime stays within what RFC 3339 can say, with the longest override.
func (c *shardsCaller) setTime(now time.Time) {
	if now.Year() < 1000 || now.Year() > 8000 {
		now = kit.T0
	}
	c.now = now
	c.Each(func(db *kit.TestDB) { db.SetClock(now) })
}

func (c *shardsCaller) send(t *testing.T, met map[string]int, function string, args []any) {
	for i := range args { // what a time.Duration can hold
		if s, ok := args[i].(kit.Span); ok {
			args[i] = kit.SpanOf(min(s.Micros(), math.MaxInt64/1000))
		}
	}
	met[function]++
	name := fmt.Sprintf("%s %v", function, args)
	call := &kit.Call{Function: function, Args: args, Model: c.Model, Now: c.now}
	ctx := context.Background()
	var told []kit.Decision
	var err error
	switch function {
	case "acquire":
		var d client.Decision
		id, _ := args[3].(string)
		of := kit.ChargeOf(args[0].(string), args[1].(string), args[2].(int64))
		d, err = kit.Request{BucketID: of.BucketID, Cost: of.Cost, IdempotencyKey: id}.By(ctx, c.limiter)
		told = []kit.Decision{kit.DecisionOf(d)}
	case "acquire_all":
		var w kit.Whole
		w, err = call.Whole().By(ctx, c.limiter)
		if slices.ContainsFunc(call.Whole().Charges, func(of model.Charge) bool {
			return client.ShardOf(of.Key, c.Of()) != client.ShardOf(call.Whole().Charges[0].Key, c.Of())
		}) {
			require.ErrorIs(t, err, client.ErrSeveralShards)
			met["of several shards"]++
			return
		}
		told = append([]kit.Decision{w.Decision}, w.Decisions...)
	case "define_policy":
		err = c.limiter.DefinePolicy(ctx, policyOf(args))
	case "drop_policy":
		err = c.limiter.DropPolicy(ctx, args[0].(string))
	default:
		want, wantErr := call.Answer()
		code, _ := kit.Refusal(wantErr)
		wire := c.wires[client.ShardOf(args[1].(string), c.Of())]
		got := kit.NoError(wire.Ask([]kit.Message{simple(c.sql(function, encodedArgs(function, args)))}))(t)[0]
		require.Equal(t, code, got.Code, name)
		if code == "" {
			require.Equal(t, want, got.Rows, name)
			c.saw(function, call.Told)
		}
		return
	}
	_, want := call.Answer()
	code, _ := kit.Refusal(want)
	require.Equal(t, code, kit.SQLState(err), "%s: %v", name, err)
	require.Equal(t, code == "", err == nil, "%s: %v", name, err)
	for i := range told {
		if err == nil {
			require.Equal(t, asDurations(call.Told[i]), told[i], name)
		}
	}
	c.saw(function, call.Told)
}

func policyOf(args []any) client.Policy {
	field := func(i int) int64 {
		if n, ok := args[i].(int64); ok {
			return cmp.Or(n, client.Zero)
		}
		return 0
	}
	length := func(i int) time.Duration {
		s, _ := args[i].(kit.Span)
		return time.Duration(s.Micros()) * kit.Us
	}
	choice := func(i int) client.Choice {
		if b, ok := args[i].(bool); ok {
			return kit.ChoiceOf(&b)
		}
		return client.Keep
	}
	return client.Policy{
		Name: args[0].(string), Capacity: field(1), Refill: field(2), Every: length(3),
		Stepped: choice(4), Durable: choice(5), Remember: length(6), Shadow: choice(7),
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
