package torture

// scripts are calls that meet what no run should leave to its luck. Each is a line: a function of the call table and its arguments in
// order, by name after those; - is null. A line that begins with ! is 22023, to the model and to SQL. The bucket that clean_up names has
// no row after it.
var scripts = map[string]string{
	// Policies d and g are alike, e is their shadow, and f is unknown.
	"answers": `
		! define_policy f
		define_policy d 10 1 1s
		define_policy e 10 1 1s shadow=true
		define_policy g 10 1 1s
		acquire f x 1                      # RL001
		acquire d x 2 i
		acquire d x 2 i                    # replayed
		acquire d x 3 i                    # RL002
		acquire d x 9                      # denied: 8 are left
		acquire d x 11                     # denied for ever
		acquire_all d,d x,y 2,1 i          # granted, in part before
		acquire_all d,d x,y 2,1 i          # replayed
		acquire d x 1 j
		acquire_all d,d x,y 1,10 j         # denied: 9 are left of y
		acquire_all d,d x,y 1,1
		acquire_all d,d x,y 1,9
		acquire_all d,d x,y 1,11
		enforce e x 6
		acquire e x 6                      # shadowed: 4 are left
		acquire_all e,e x,y 6,6
		acquire d x 5 k
		settle d x k 1                     # gives back
		settle d x k 1
		acquire d x 5 k                    # RL004
		acquire d x 1 l
		settle d x l 50                    # into debt
		settle d x none 1                  # RL003
		settle e x none 1                  # which a shadow may not have needed
		charge d y 20 m                    # into debt
		charge d y 20 m                    # replayed
		charge d y 9000000000000           # to the floor
		reserve g x 1d 4 n                 # at once
		reserve g x 1d 4 n                 # replayed
		reserve g x 1d 10                  # waits for 4
		reserve g x 0s 10                  # refused
		reserve e x 1d 6                   # shadowed
		acquire_up_to g y 6 1 o            # all
		acquire_up_to g y 6 1 o            # replayed
		acquire_up_to g y 6 1              # 4
		acquire_up_to g y 6 1              # denied
		acquire_up_to e x 6 5              # shadowed
		acquire_many d,d x,x 1,1 q,q       # granted, and replayed
		acquire_many d,d x,x 1,2 r,r       # granted, and RL002
		acquire_many d z 1 p
		acquire_many d z 1 q               # all at first sight
		acquire_all d,g y,y 0,9            # no tokens of a bucket in debt
		override g x 20 expires_at=+60s
		acquire g x 1
		wait 60s
		acquire g x 1
		wait 1h
		clean_up`,

	// Two days of a quota: the first ends as clocks change.
	"quotas": `
		define_policy q 10 remember=7d period=1d time_zone=Europe/Berlin
		acquire q x 8 i
		acquire q x 3
		acquire q x 11
		define_policy q 5
		acquire q x 0
		define_policy q 10
		at 2024-03-30T22:59:59.999999
		acquire q x 3
		at 2024-03-30T23:00:00
		acquire q x 3
		settle q x i 1                     # gives nothing back to the day after
		reserve q x 1d 7
		reserve q x 1d 7
		acquire_up_to q y 11 1
		charge q y 9000000000000
		at 2024-03-31T01:00:00
		define_policy q anchor=2024-03-31T01:30:00
		acquire q x 10
		override q x time_zone=Europe/London                                     # its turn was an hour after the policy's
		acquire q x 1
		override q x anchor=2024-03-31T00:15:00                                  # none since
		acquire q x 10
		at 2024-03-31T01:30:00
		override q x anchor=2024-03-31T02:15:00
		acquire q x 10
		define_policy m 10 period=1mon anchor=2024-01-31T00:00:00                # the turn before was on 29 February
		acquire m x 3
		acquire m x 9
		at 2024-04-30T01:00:00
		acquire m x 9`,

	// Each bucket is settled once, all or none.
	"settlements of several": `
		define_policy a 10 1 1s
		define_policy b 10 1 1s durable=false
		define_policy q 10 period=1d
		define_policy s 10 1 1s shadow=true
		define_policy slots 3 lease=60s
		settle_all a,b x,x 1 1,1                       # RL003
		acquire_all a,b,q,a,s x,x,x,x,x 2,3,4,1,0 1
		! settle_all a,b,q,s x,x,x,x 1 3,3,3
		! settle_all a,slots x,x 1 3,3
		! settle_all a,a x,x 1 9000000000000,1
		! settle_all a,b x,x 1 -1,3
		settle_all a,none x,x 1 3,3                    # RL001
		settle_all a,b,q,s x,y,x,x 1 3,3,3,1           # RL003
		settle b x 1 5
		settle_all a,b,q x,x,y 1 3,6,3                 # RL003, before RL002
		settle_all a,b,q x,x,x 1 3,6,3                 # RL002: nothing moved
		peek a x 1
		settle_all a,b,q,s,a x,x,x,x,x 1 1,5,3,1,2     # the rest; half was settled; a is named twice
		settle_all a,b,q,s,a x,x,x,x,x 1 1,5,3,1,2     # replayed
		settle_all a,b x,x 1 2,5                       # RL002
		settle_all s x 1 4
		acquire_all a,b x,x 1,1 1                      # RL004
		grants a - - 9
		grants b x true 9
		grants q - false 9
		! grants slots - - 9`,

	// The periods of a key follow each other, whatever happens to its calendar and to the clock.
	"usage": `
		define_policy q 10 remember=7d period=1mon history=12mon
		define_policy z 10 period=1mon history=40d
		define_policy n 10 period=1mon
		define_policy e 10 durable=false period=1mon
		define_policy d 10 1 1s
		! define_policy e history=12mon
		! define_policy d history=12mon
		! define_policy q history=3h
		! define_policy q history=12001mon
		! define_policy q history=1mon1d
		! usage e - - - 9
		! usage d - - - 9
		! usage q - 2024-04-01T00:00:00 2024-04-01T00:00:00 9
		acquire q x 3 i
		acquire q y 4
		acquire q w 2 j
		acquire z x 5
		acquire n x 6
		override z x time_zone=Pacific/Auckland
		acquire z x 1
		override q y anchor=2024-01-15T00:00:00
		acquire q y 2
		acquire q x 10                                  # denied
		usage q - - - 9
		at 2024-04-01T00:00:00
		acquire q x 11                                  # a denial closes nothing
		acquire q x 3 i                                 # nor does a replay
		usage q - - - 9
		charge q x 20                                   # more than there is
		settle q w j 5                                  # what is owed more is charged now, and closes, too
		settle q x i 5
		refund q x 3
		usage q - - - 9
		usage q x 2024-04-01T00:00:00 - 9
		usage q x - 2024-04-01T00:00:00 9
		acquire_many q,q,z x,y,x 1,1,1
		acquire_all q,z y,x 1,1
		usage q - - - 9
		usage z - - - 9
		usage n - - - 9                                 # without a history what is over does not count
		at 2024-04-16T00:00:00
		override q y anchor=2024-01-20T00:00:00         # which closes what is over, and begins where that ends
		acquire q y 1
		usage q y - - 9
		remove_override q y
		acquire q y 1
		at 2024-05-02T00:00:00
		reset q x
		reset_all z
		define_policy q anchor=2024-01-31T00:00:00
		usage q - - - 9
		acquire q y 1
		usage q - - - 9
		at 2024-06-02T00:00:00
		clean_up
		usage q - - - 9
		usage z - - - 9
		at 2024-05-03T00:00:00                          # the clock was ahead
		acquire q y 2
		usage q y - - 9
		define_policy q history=0d
		acquire q y 1
		at 2024-06-03T00:00:00
		acquire q y 1                                   # of which nothing is kept
		usage q y - - 9
		define_policy q history=12mon anchor=2024-01-02T00:00:00
		acquire q y 1
		at 2024-07-03T00:00:00
		reserve q y 1d 2
		acquire_up_to q y 20 1
		usage q y - - 9
		at 2024-10-03T00:00:00                          # a key that sleeps
		clean_up
		usage q y - - 9
		acquire q y 1
		at 2025-12-03T00:00:00
		clean_up
		usage q y - - 9`,

	// The last period of x ended after the turn before its new row, by the calendar that it has now.
	"periods that would overlap": `
		define_policy q 10 period=1mon history=12mon
		acquire q x 1
		at 2024-04-02T00:00:00
		acquire q x 1
		reset q x
		override q x anchor=2024-01-20T00:00:00
		acquire q x 1
		at 2024-04-21T00:00:00
		acquire q x 1
		usage q x - - 9`,

	"pauses of a continuous policy": "define_policy d 10 1 1s\n" + callsOfPauses,
	"pauses of a stepped policy":    "define_policy d 10 1 1s true\n" + callsOfPauses,
	"a pause of what is always full": `
		define_policy d 0 1 1s
		pause d x 1d
		wait 12h
		clean_up`,

	// A customer with a zone, who tries a plan, buys it in the trial, is blocked and boosted for a minute, and moves house. Then the
	// policy is raised and lowered.
	"patches of a quota": `
		define_policy q 10 period=1d time_zone=UTC
		override q x time_zone=America/New_York
		acquire q x 11
		override q x 50 expires_at=+1d         # a trial
		override q x expires_at=+2d            # that is longer
		override q x time_zone=Europe/London   # it goes on
		overrides - - 10
		acquire q x 11
		override q x 30                        # bought: counts at once, and stays
		acquire q x 20
		! override q x expires_at=+3d
		override q x 0 expires_at=+60s         # a block
		acquire q x 1
		override q x 40 expires_at=+90s        # a boost
		acquire q x 10
		peek q x 9
		peek q x 10
		wait 90s
		peek q x 1
		override q x time_zone=Asia/Tokyo      # moved house: 30 stay
		override q y time_zone=Asia/Tokyo
		define_policy q 100
		peek q x 1
		acquire q y 99
		define_policy q 5
		peek q y 1
		remove_override q x
		peek q x 5
		overrides q - 10`,

	// refill and every are one; of what is not set the policy's counts, as it is at each call.
	"patches of buckets": `
		define_policy d 10 1 1s
		override d c 20
		override d r refill=2                  # in a second
		override d e every=500ms               # which are its numbers then
		acquire d c 20
		acquire d r 10
		acquire d e 10
		define_policy d 15 5 10s
		acquire d c 1
		acquire d r 1
		acquire d e 1
		override d r refill=4 expires_at=+5s   # in a second, as it stays
		override d e refill=3                  # in half a second
		overrides d - 10
		wait 5s
		override d r 30 expires_at=+1s         # by when the others have ended
		overrides d r 10
		acquire d r 9
		define_policy d 3 1 1s true
		peek d c 1
		acquire d r 1
		wait 10m
		clean_up
		define_policy d 1 1 1d false
		override d w 9 1 1s
		! override d w 9000000000000 1 1d
		define_policy d 1 1 1s
		override d f 200000000                 # which fills in 6 years, and after the next line in 500,000
		define_policy d 1 1 1d
		acquire d f 100000000
		acquire d f 100000000
		acquire d f 1
		acquire_all d,d f,w 1,1
		reserve d f 1d 1 i
		charge d f 5 j
		settle d f j 6
		acquire_up_to d f 9 1
		acquire_many d,d f,f 1,1 k,l
		acquire_packed d f 5
		refund d f 7
		acquire_up_to d f 9 1
		pause d f 1d
		! override d f 300000000 expires_at=+60s
		override d f 5 expires_at=+60s
		acquire d f 1
		status - 10 -
		peek d f 1`,

	// By the end of the override the policy's refill counts, from the last write.
	"an end": `
		define_policy ends 10 1 1h
		acquire ends x 10
		override ends x 10 1 1s expires_at=+4s
		acquire ends x 1
		acquire ends x 2
		acquire ends x 3
		acquire ends x 4
		acquire ends x 5`,

	// Clocks change in Europe in the night after the scripts begin.
	"a day of 23 hours": `
		define_policy d 10 1 1s
		acquire d x 2 i
		wait 23h30m
		acquire d x 2 i                    # replayed
		peek d x 1
		wait 1h
		acquire d x 2 i`,

	// A bucket without a row is full by the policy's capacity when the override has ended.
	"an end of less": `
		define_policy d 10 1 1s
		override d x 5 expires_at=+1s
		acquire_all d x 8
		acquire_many d,d x,y 8,8
		acquire_packed d x 8`,

	// The last bucket fits after 100 s. The override of the first ends before, and its policy fits after 200 s. The override of the
	// second ends between, and its policy fits after 400 s.
	"ends before the longest wait": `
		define_policy a 10 1 200s
		define_policy b 10 1 400s
		define_policy c 10 1 100s
		override a x every=10s expires_at=+50s
		override b x every=10s expires_at=+150s
		charge a x 10
		charge b x 10
		charge c x 10
		acquire_all a,b,c x,x,x 1,1,1`,

	// More than 100,000 years, where waits saturate.
	"a clock that was far ahead": `
		define_policy q 10 period=1d time_zone=UTC
		define_policy s 3 lease=60s
		define_policy d 100 1 1s
		define_policy e 100 1 1s durable=false
		define_policy m 100 1 1s shadow=true
		define_policy t 100 1 1s stepped=true
		wait 36600000d
		acquire q x 8
		hold s x a 2
		acquire_many d,d,d,e,m,t x,y,z,x,x,x 50,50,50,50,50,50
		at 2024-03-30T12:00:00
		acquire d x 1
		acquire d x 1 i
		acquire d x 90
		acquire e x 1
		acquire m x 90
		acquire t x 1
		peek d x 1
		peek d x 90
		enforce d x 1
		acquire_up_to d x 2 1
		acquire_up_to d x 90 80
		reserve d x 60s 1
		reserve d x 60s 90
		charge d x 1 j
		settle d x j 2
		refund d x 1
		acquire_all d,d x,y 1,2
		acquire_all d,d x,y 1,90
		acquire_many d,d,d,d x,y,y,z 1,2,90,3
		acquire_many e,m,t x,x,x 90,90,90
		acquire_packed d x 1
		acquire_packed d z 90
		acquire_packed d,d,d x,y,y 1,1,90
		pause d x 60s
		acquire q x 3
		acquire_all q x 3
		acquire_all q,q x,y 3,1
		peek s x 0
		hold s x b 2`,

	// A charge that took a part of its cost, as the bucket was at its floor then.
	"the floor": `
		define_policy floor 10 1 1s
		charge floor x 9000000000000 i
		settle floor x i 100`,

	// A bucket keeps what it held as its policy was larger. With the refill that is added to it, that is more than a bigint holds.
	"lowered from the most": `
		define_policy d 9000000000000 9000000000000 1s
		define_policy e 9000000000000 9000000000000 1s durable=false
		define_policy t 9000000000000 9000000000000 1s stepped=true
		acquire_all d,d,d,d,d,d,e,t,t x,y,z,u,v,w,x,x,y
		define_policy d 99999999999 99999999999 1us
		define_policy e 99999999999 99999999999 1us
		define_policy t 99999999999 99999999999 1us
		wait 1s
		peek d x 1
		acquire d x 1
		acquire_all d y
		acquire_all d,d y,z 1,99999999999
		acquire_all e x
		acquire_up_to d u 2 1
		acquire_many d,d,d u,v,v
		acquire_many t,t x,y
		reserve d w 1s 1`,

	// What refilled until then stays, and what a bucket had at the later instant it does not lose.
	"several, and a clock that goes back": `
		define_policy d 10 1 1s
		define_policy e 10 1 1s durable=false
		define_policy s 10 1 1s shadow=true
		acquire_all d,d,e,s x,y,x,x 4,5,6,7
		wait 2s
		acquire_all d,d,e,s x,y,x,x
		at 2024-03-30T12:00:00
		acquire_all d,d,e,s x,y,x,x
		acquire_all d,d x,y 2,1 i
		acquire_all d,d x,y 2,1 i          # replayed
		acquire_all d,d x,y 9,1            # denied
		wait 3s
		acquire_all d,d,e,s x,y,x,x`,

	// Buckets are locked in another order than the request names them.
	"the first of equals": `
		define_policy d 10 1 1s
		define_policy e 10 1 1s shadow=true
		acquire_all d,d y,x
		acquire_all d,d y,x                # granted by what is stored
		acquire_all d,d y,x 9,9            # denied
		acquire_all d,d y,x 8,8
		wait 5s
		acquire_all d,d y,x                # granted by what has refilled
		acquire_all e,e y,x 8,8
		acquire_all e,e y,x 2,2
		acquire_all e,e y,x 9,9            # shadowed
		acquire_all d,e,e x,y,x 1,9,9`,

	"slots": `
		define_policy s 3 lease=60s
		define_policy w 1 shadow=true lease=60s
		hold s x a 2
		hold s x a 2
		hold s x b 2
		hold s x b 4
		hold w x a 1
		hold w x b 1
		renew s x a
		renew s x b
		override s x 1 expires_at=+1s lease=60s
		hold s x a 2                       # which holds, although the capacity is lower by now
		hold s x b 1
		hold s x b 2                       # which does not fit when the override ends
		holders - - 100
		hold s y a 1
		hold s y b 1
		release s y a
		release s y a
		holders s y 100
		wait 1s
		release s x a
		release s x a
		hold s x c 1
		wait 1h
		clean_up`,

	// By the calendar that was, and not by the one that is from then on.
	"a calendar that is removed": `
		define_policy q 10 period=1mon history=12mon
		override q x anchor=2024-01-15T00:00:00
		acquire q x 4
		at 2024-04-16T00:00:00
		remove_override q x
		acquire q x 1
		usage q x - - 9`,

	// What an override of a zone does not set is the policy's. A row with a history is full by the turn of its key alone, and another by
	// that of the policy, too.
	"clean-up under a zone": `
		define_policy q 10 period=1d
		define_policy h 10 period=1d history=40d
		override q x time_zone=Asia/Tokyo
		override h x time_zone=Asia/Tokyo
		acquire q x 3
		acquire h x 3
		at 2024-03-30T15:05:00             # which ends the five minutes of its turn
		clean_up h x
		usage h x - - 9
		at 2024-03-31T00:05:00
		clean_up q x`,

	// By the end of the first lease, unless the override has ended then.
	"waits for slots": `
		define_policy s 3 lease=60s
		hold s x a 2
		override s y 5 expires_at=+60s
		hold s y a 3
		wait 30s
		hold s x b 1
		hold s x c 1
		hold s y b 2
		hold s y c 1
		hold s y c 2`,

	// A lease that had ended by a clock that was ahead counts again, although it was released.
	"a release after the end": `
		define_policy s 3 lease=60s
		hold s x a 2
		at 2024-03-30T12:01:00
		release s x a
		at 2024-03-30T12:00:30
		hold s x b 2`,

	// What the row of a key counts until the end of a lease that becomes shorter.
	"sums of slots": `
		define_policy s 9 lease=60s
		hold s x a 1
		override s x 9 lease=2s
		renew s x a
		hold s y a 1
		override s y 9 lease=2s
		hold s y b 1
		wait 2s
		hold s x b 1
		hold s y c 1
		clean_up
		wait 2s
		release s x b
		hold s x c 1`,

	// Definitions, overrides and requests that are just wrong.
	"bounds": `
		! define_policy new 1
		! define_policy new 1 1 1mon
		! define_policy new 1 1 1s remember=1mon
		! define_policy new period=1d
		! define_policy new 1 1 period=1d
		! define_policy new 1 every=1s period=1d
		! define_policy new 1 period=0d
		! define_policy new 1 period=1mon1d
		! define_policy new 1 period=-1d
		! define_policy new 1 period=12001mon
		! define_policy new 1 period=365251d
		! define_policy new 1 period=24h
		! define_policy new 1 period=1d time_zone=CET
		! define_policy new 1 period=1d time_zone=Europe/Atlantis
		! define_policy new 1 period=1d time_zone=Europe/./Berlin
		! define_policy new 1 period=1d time_zone=right/Europe/Berlin
		! define_policy new 1 period=1d time_zone=CST6CDT
		! define_policy new 1 period=1d stepped=false
		! define_policy new 1 1 1s time_zone=UTC
		! define_policy new 1 1 1s anchor=2024-03-30T12:00:00
		! define_policy new lease=60s
		! define_policy new 0 lease=60s
		! define_policy new 10001 lease=60s
		! define_policy new 1 lease=0s
		! define_policy new 1 lease=999us
		! define_policy new 1 lease=365251d
		! define_policy new 1 lease=1mon
		! define_policy new 1 lease=-1s
		! define_policy new 1 1 lease=60s
		! define_policy new 1 every=1s lease=60s
		! define_policy new 1 time_zone=UTC lease=60s
		! define_policy new 1 anchor=2024-03-30T12:00:00 lease=60s
		! define_policy new 1 period=1d lease=60s
		! define_policy new 1 stepped=false lease=60s
		! define_policy new 1 remember=1s lease=60s
		define_policy most 10000 lease=365250d
		define_policy least 1 lease=1000us
		define_policy user 10 1 1s
		define_policy org 20 2 1s
		define_policy quota 1 period=1d
		define_policy jobs 3 lease=5m
		! define_policy user time_zone=UTC
		! define_policy user anchor=2024-03-30T12:00:00
		! define_policy user lease=60s
		! define_policy jobs refill=1
		! define_policy jobs every=1s
		! define_policy jobs time_zone=UTC
		! define_policy jobs anchor=2024-03-30T12:00:00
		! define_policy quota refill=0
		! define_policy quota every=1s
		! define_policy quota lease=60s
		! override user x time_zone=UTC
		! override user x anchor=2024-03-30T12:00:00
		! override user x lease=60s
		! override jobs x refill=1
		! override jobs x every=1s
		! override jobs x time_zone=UTC
		! override jobs x anchor=2024-03-30T12:00:00
		! override quota x refill=0
		! override quota x every=1s
		! override quota x lease=60s
		! define_policy user period=1d
		! define_policy jobs period=1d
		! define_policy org durable=false
		! define_policy least durable=false
		define_policy jobs durable=true shadow=false
		! override jobs x lease=999us
		! override jobs x 10001
		! override jobs x -1
		override none x lease=60s          # RL001
		! override none x                  # a call that sets nothing
		! override user x expires_at=+60s  # nothing ends
		! override none x -1 1 1s          # which comes before
		! override user x expires_at=+0s
		! hold jobs x a 0
		! hold jobs x a -1
		! hold jobs x a -9223372036854775808
		! hold user x a 1
		! renew user x a
		! release user x a
		hold none x a 1
		renew none x a
		release none x a
		! acquire jobs x 1
		! acquire_all user,jobs x,x 1,0
		! acquire_all none,jobs x,x 1,1
		! refund jobs x 1
		! charge jobs x 1 i
		! settle jobs x i 1
		! reserve jobs x 0s 1 i
		! acquire_up_to jobs x 1 1 i
		! peek none x -1
		peek user x 0                      # from which nothing was taken
		acquire_all user,user x,x 9223372036854775807,9223372036854775807    # the sum is beyond a bigint
		acquire user x 1 i
		settle user x i 1
		acquire org x 2 i
		acquire_all user,org x,x 1,1 i     # of two errors of a request, that of the cost comes first
		! override quota x 2 expires_at=+60s time_zone=Pacific/Auckland          # a calendar does not end
		! override quota x expires_at=+60s anchor=2024-03-30T12:00:00
		override org x 3 expires_at=+60s
		wait 60s
		! override org x expires_at=+60s   # it has ended
		remove_override org x              # likewise
		override quota x time_zone=Pacific/Auckland
		overrides quota x 10`,
}

// callsOfPauses come before and after what could end them.
const callsOfPauses = `
	acquire d p 3
	wait 500ms
	acquire d p 5 p
	pause d p 10s
	pause d p 5s
	settle d p p 1
	refund d p 2
	acquire d p 1
	wait 5s
	refund d p 2
	acquire d p 1
	wait 4999999us
	refund d p 2
	acquire d p 1
	wait 1us
	refund d p 2
	acquire d p 1
	wait 1s
	refund d p 2
	acquire d p 1
	acquire d o 3                          # whose other numbers end in the pause
	wait 500ms
	override d o every=300ms expires_at=+1s
	pause d o 2s
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	wait 500ms
	acquire d o 1
	acquire d b 3                          # whose other numbers end in the pause, in debt
	wait 500ms
	override d b every=300ms expires_at=+1s
	charge d b 12
	pause d b 2s
	wait 2s
	acquire d b 1
	acquire d s 3                          # whose interval becomes shorter
	wait 500ms
	pause d s 2s
	override d s every=100ms
	wait 1999999us
	acquire d s 1
	acquire d n 3                          # whose debt is paid meanwhile
	wait 500ms
	charge d n 12
	pause d n 3s
	wait 3s
	acquire d n 1`

// toMeet is what the scripts meet, so that they do not cease to say what they were written for.
var toMeet = []string{
	"acquire: granted", "acquire: denied", "acquire: denied for ever", "acquire: replayed", "acquire: shadowed",
	"answered with RL001", "answered with RL002", "answered with RL003", "answered with RL004", "answered with 22023",
	"acquire_all: granted", "acquire_all: denied", "acquire_all: denied for ever", "acquire_all: replayed", "acquire_all: shadowed",
	"charge: debt", "charge: replayed", "settle: granted", "settle: debt", "settle: replayed", "settle: shadowed",
	"reserve: granted", "reserve: waits", "reserve: denied", "reserve: replayed", "reserve: shadowed", "acquire_up_to: granted",
	"acquire_up_to: denied", "acquire_up_to: replayed", "acquire_up_to: shadowed", "quota, acquire: granted",
	"quota, acquire: denied", "quota, acquire: denied for ever", "quota, charge: debt", "quota, reserve: granted",
	"quota, reserve: denied", "slots, hold: granted", "slots, hold: denied", "slots, hold: denied for ever",
	"slots, hold: replayed", "slots, hold: shadowed", "slots, renew: granted", "slots, renew: denied for ever",
	"slots, release: granted", "slots, release: denied",
}
